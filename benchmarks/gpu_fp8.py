"""The fp8 precisions on a GPU: whether what is promised holds there, and what a step takes beside bfloat16.

python benchmarks/gpu_fp8.py
drivetrain launch --num_processes 2 benchmarks/gpu_fp8.py --backend fsdp

Without a GPU, torchao's products are emulated: `--cpu --width 64 --steps 4` shows that this script works. It ends with
exit code 1 if a promise is broken. A precision that can't be had is a row with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from measuring import Summary, table, write_results
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from drivetrain import Accelerator, state
from drivetrain.errors import DrivetrainError

CASES: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"mixed_precision": "bf16"},
    "torchao tensorwise": {"mixed_precision": "fp8-torchao"},
    "torchao rowwise": {"mixed_precision": "fp8-torchao", "fp8-torchao": {"recipe": "rowwise"}},
    "torchao rowwise_with_gw_hp": {"mixed_precision": "fp8-torchao", "fp8-torchao": {"recipe": "rowwise_with_gw_hp"}},
    **{
        f"te {recipe}": {"mixed_precision": "fp8-te", "fp8-te": {"recipe": recipe}}
        for recipe in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    },
    "te NVFP4BlockScaling": {"mixed_precision": "fp8-te", "fp8-te": {"recipe": "NVFP4BlockScaling"}},
}
_CLOSE = 0.15
"""Losses may differ from bfloat16's by that part; NVFP4 is a format of 4 bits, and may by twice as much."""


class Block(nn.Module):
    """A feed-forward block: where most of the time of a transformer goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return y


@attrs.frozen
class Found:
    """What one precision showed."""

    name: str
    broken: tuple[str, ...] = ()
    """Promises that do not hold."""
    refused: str = ""
    layers: int = 0
    """That were converted."""
    error: float = 0.0
    """Of the first outputs, as a part of float32's."""
    loss: float = 0.0
    """After training."""
    seconds: tuple[float, ...] = ()
    """Of each step."""


def examine(name: str, options: argparse.Namespace) -> Found:
    """Train, save, load and unwrap with one precision."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            accelerator = _start(name, options, folder)
        except DrivetrainError as error:
            return Found(name, refused=str(error))
        shared = accelerator.run.hooks.broadcast_object(run=accelerator.run, value=folder, source=0, group=None)
        plain = _model(options).to(accelerator.device)
        objects = _prepare(accelerator, options)
        layers = sum(type(module).__module__.startswith("drivetrain_fp8") for module in objects[0].modules())
        with torch.no_grad():
            x, _ = _batch(0, accelerator, options)
            right = plain(x)
            error = float((objects[0](x) - right).norm() / right.norm())
        losses, seconds = _train(accelerator, objects, 0, options.steps, options)
        accelerator.save_state(Path(shared, "state"))
        expected, _ = _train(accelerator, objects, options.steps, 3, options)
        broken = list(_unwrapped(accelerator, objects[0], options))
        state.reset()
        accelerator = _start(name, options, folder)
        objects = _prepare(accelerator, options)
        accelerator.load_state(Path(shared, "state"))
        found, _ = _train(accelerator, objects, options.steps, 3, options)
        if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-2):
            broken.append(f"losses after loading are {found}, and were {expected}")
        state.reset()
    if name != "bf16" and not layers:
        broken.append("no layer was converted")
    return Found(name, tuple(broken), "", layers, error, losses[-1], tuple(seconds))


def _start(name: str, options: argparse.Namespace, folder: str) -> Accelerator:
    config = {**CASES[name], "collective_timeout": 120, "compile": True if options.compile else None}
    if options.backend:
        config["backend"] = options.backend
    path = Path(folder, "config.yaml")
    path.write_text(json.dumps(config))  # JSON is YAML
    return Accelerator(cpu=options.cpu, config_file=path)


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(options.width) for _ in range(options.layers)))


def _prepare(accelerator: Accelerator, options: argparse.Namespace) -> Any:
    model = _model(options)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def _batch(number: int, accelerator: Accelerator, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number * accelerator.num_processes + accelerator.process_index)
    x = torch.randn(options.rows, options.width, generator=generator).to(accelerator.device)
    return x, x.flip(1).sin()


def _train(
    accelerator: Accelerator, objects: Any, first: int, steps: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Losses, and seconds of each step; the first ones compile and tune, and are not counted."""
    model, optimizer = objects
    losses, seconds = [], []
    for step in range(first, first + steps):
        x, y = _batch(step, accelerator, options)
        accelerator.run.hooks.synchronize(run=accelerator.run)
        begun = time.perf_counter()
        loss = mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.run.hooks.synchronize(run=accelerator.run)
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    return losses, seconds[steps // 4 :]


def _unwrapped(accelerator: Accelerator, model: nn.Module, options: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the plain model that training leaves."""
    learnt = accelerator.get_state_dict(model)
    if accelerator.is_main_process and list(learnt) != list(_model(options).state_dict()):
        yield f"the state dict has other names than the plain model's: {sorted(learnt)}"
    if accelerator.run.capabilities.shards_params:
        return  # each rank has a part of it
    right = _model(options).to(accelerator.device)
    right.load_state_dict(learnt)
    x, _ = _batch(0, accelerator, options)
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    with torch.no_grad():
        if not torch.allclose(plain(x), right(x), rtol=1e-4, atol=1e-5):
            yield "the unwrapped model computes something else than a plain one with its weights"


def judge(found: Sequence[Found]) -> list[str]:
    """All promises that are broken, those among them that only a comparison shows."""
    wrong = [f"{each.name}: {what}" for each in found for what in each.broken]
    reference = next(each for each in found if each.name == "bf16")
    for each in found:
        allowed = 2 * _CLOSE if "NVFP4" in each.name else _CLOSE
        if not each.refused and abs(each.loss - reference.loss) > allowed * reference.loss:
            wrong.append(f"{each.name}: its loss is {each.loss:.4g}, and that of bf16 {reference.loss:.4g}")
        if not each.refused and each is not reference and not each.error > 1.5 * reference.error:
            wrong.append(f"{each.name}: its error is {each.error:.1e}, as of bf16: nothing is rounded to 8 bits")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8192, help="of a batch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backend", help="for several processes")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", help="cases whose names have this in them; bf16 always")
    parser.add_argument("--no_results", action="store_true", help="print the table only, write no JSON")
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    names = [name for name in CASES if name == "bf16" or not options.only or options.only in name]
    found = [examine(name, options) for name in names]
    wrong = judge(found)
    if int(os.environ.get("RANK", "0")) == 0:
        print(_report(found))
        print(*(f"BROKEN: {each}" for each in wrong), sep="\n")
        if not options.no_results:
            write_results("gpu_fp8", [{**attrs.asdict(each), "options": vars(options)} for each in found], load)
    sys.exit(1 if wrong else 0)


def _report(found: Sequence[Found]) -> str:
    reference = Summary.of(found[0].seconds)
    rows = []
    for each in found:
        if each.refused:
            rows.append([each.name, "refused", "", "", ""])
            continue
        summary = Summary.of(each.seconds)
        speed = f"{reference.median / summary.median:.2f}"
        rows.append([each.name, summary.text(1e3, 2), speed, f"{each.error:.1%}", f"{each.loss:.4g}"])
    text = table(["precision", "step, ms", "times bf16's speed", "error of the first outputs", "last loss"], rows)
    return "\n".join([text, *(f"{each.name}: {each.refused}" for each in found if each.refused)])


if __name__ == "__main__":
    main()
