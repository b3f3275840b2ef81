"""The training loop that is timed, as each library's own documentation writes it.

All of them train the same model on the same data: forward, backward, clip, step, schedule and clear.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

__all__ = ["Case", "build"]

Pass = Callable[[], None]
"""One pass over the loader."""


@attrs.frozen(kw_only=True)
class Case:
    """What is trained, and how."""

    model: str
    """``"tiny"`` or ``"transformer"``."""
    steps: int
    """Micro-batches of one rank in a pass; a multiple of ``accumulation``."""
    accumulation: int = 1
    precision: str = "no"
    ranks: int = 1


def build(contender: str, options: Mapping[str, Any]) -> tuple[Pass, Pass]:
    """One pass of the hand-written loop and one of the contender's, for the worker to time."""
    torch.set_num_threads(1)
    case = Case(**options)
    subject = _LOOPS[contender](case)  # first: its library brings up the process group that the reference shares
    return torch_loop(case), subject


# ------------------------------------------------------------------------------------------------- what they train


class Transformer(nn.Module):
    """A small encoder over token ids (n, length), one of ten classes for each sequence: (n, 10)."""

    def __init__(
        self, vocabulary: int = 256, width: int = 128, heads: int = 4, layers: int = 2, length: int = 64
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits from the mean over positions."""
        return self.head(self.layers(self.tokens(ids) + self.positions).mean(dim=1))


def _parts(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR, TensorDataset, int]:
    """Model, optimizer, scheduler, data and batch size."""
    torch.manual_seed(0)
    batch = 8
    rows = batch * case.steps * case.ranks
    if case.model == "tiny":
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
        inputs = torch.randn(rows, 16)
    else:
        model = Transformer()
        inputs = torch.randint(0, 256, (rows, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step / 1000))
    return model, optimizer, scheduler, TensorDataset(inputs, torch.randint(0, 10, (rows,))), batch


# ------------------------------------------------------------------------------------------------------ who trains it


def torch_loop(case: Case) -> Pass:
    """Written by hand, for exactly this device, number of ranks and precision."""
    model, optimizer, scheduler, data, batch = _parts(case)
    sampler = None
    unsynchronized: Callable[[], Any] = contextlib.nullcontext
    if case.ranks > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler, unsynchronized = DistributedSampler(data), model.no_sync
    loader = DataLoader(data, batch, shuffle=sampler is None, sampler=sampler)
    autocast: Callable[[], Any] = contextlib.nullcontext
    if case.precision == "bf16":
        autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    device = torch.device("cpu")

    def run() -> None:
        for index, (inputs, targets) in enumerate(loader, 1):
            last = index % case.accumulation == 0
            with contextlib.nullcontext() if last else unsynchronized():
                with autocast():
                    logits = model(inputs.to(device))
                loss = F.cross_entropy(logits.float(), targets.to(device))
                (loss / case.accumulation if case.accumulation > 1 else loss).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def drivetrain_loop(case: Case) -> Pass:
    """As in the README."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulation)
    model, optimizer, scheduler, data, batch = _parts(case)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, batch, shuffle=True)
    )

    def run() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def accelerate_loop(case: Case) -> Pass:
    """As in its documentation of gradient accumulation and clipping."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulation)
    model, optimizer, scheduler, data, batch = _parts(case)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, batch, shuffle=True)
    )

    def run() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def fabric_loop(case: Case) -> Pass:
    """As in its documentation of gradient accumulation and clipping."""
    from lightning_fabric import Fabric

    fabric = Fabric(
        accelerator="cpu",
        devices=case.ranks,
        strategy="ddp" if case.ranks > 1 else "auto",
        precision={"no": "32-true", "bf16": "bf16-mixed"}[case.precision],
    )
    fabric.launch()
    model, optimizer, scheduler, data, batch = _parts(case)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch, shuffle=True))
    many = case.ranks > 1

    def run() -> None:
        for index, (inputs, targets) in enumerate(loader, 1):
            last = index % case.accumulation == 0
            with fabric.no_backward_sync(model, enabled=many and not last):
                loss = F.cross_entropy(model(inputs), targets)
                fabric.backward(loss / case.accumulation if case.accumulation > 1 else loss)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


_LOOPS: Mapping[str, Callable[[Case], Pass]] = {
    "torch": torch_loop,
    "drivetrain": drivetrain_loop,
    "accelerate": accelerate_loop,
    "fabric": fabric_loop,
}
