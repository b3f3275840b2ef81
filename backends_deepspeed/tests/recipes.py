"""What the tests of this member share: a small model, its data, and a world of ranks with the engine in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH, ROWS = 8, 4


class Net(nn.Module):
    """Sizes that two ranks do not divide, a scalar, a frozen layer, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.frozen = nn.Linear(13, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.tied(self.frozen(self.first(x).tanh()))) * self.scale + self.shift


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def grouped(model: Net, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Two groups with learning rates and hyper-parameters of their own."""
    first = {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.1}
    rest = {"params": [model.tied.weight, model.scale], "lr": 0.01}
    if kind is torch.optim.SGD:
        return torch.optim.SGD([first, rest], lr=1.0, momentum=0.9)
    return kind([first, rest], lr=1.0, betas=(0.8, 0.95), eps=1e-5)  # type: ignore[call-arg]


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = batch(number)
    return mse_loss(model(x), y)


def by_hand(
    updates: int, ranks: int, steps: int = 1, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, clip: float = 0.0
) -> tuple[dict[str, Tensor], list[float]]:
    """Plain torch in one process on the data of all ranks; weights and norms."""
    model, norms = net(), []
    optimizer = grouped(model, kind)
    for update in range(updates):
        for number in range(update * steps * ranks, (update + 1) * steps * ranks):
            (loss_of(model, number) / steps / ranks).backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), norms


def train(
    updates: int,
    steps: int = 1,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    clip: float = 0.0,
    twice: bool = False,
) -> tuple[dict[str, Tensor], list[float]]:
    """The same through the library; ``twice``: each micro-batch's loss in two halves, a backward for each."""
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    model = net(seed=rank)  # rank 0's values are everybody's
    model, optimizer = accelerator.prepare(model, grouped(model, kind))
    norms: list[float] = []
    for update in range(updates):
        for step in range(steps):
            number = update * steps * ranks + step * ranks + rank
            with accelerator.accumulate(model):
                losses = [loss_of(model, number)] if not twice else [loss_of(model, number) / 2 for _ in range(2)]
                for loss in losses:
                    accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                optimizer.zero_grad()
    return full(accelerator, model), norms


def full(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def settings(stage: int, precision: str = "no", **section: Any) -> dict[str, Any]:
    section = {"zero_stage": stage, **({"param_persistence_threshold": 0} if stage == 3 else {}), **section}
    run = {"backend": "deepspeed", "device": "cpu", "mixed_precision": precision}
    # A rank that imports the engine for the first time keeps the others waiting.
    return {**run, "collective_timeout": 40, "deepspeed": section}


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def parameters_of(module: nn.Module) -> Iterator[int]:
    """Elements of each parameter that this rank holds."""
    return (parameter.to_local().numel() for parameter in module.parameters())
