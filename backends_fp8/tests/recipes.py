"""What the tests of this member train: a small net with layers of multiples of 16, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH, INPUTS, ROWS = 32, 16, 16
LINEARS = ["first", "blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer", "head"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, INPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(seed: int = 0) -> Net:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return Net()


def batch(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that can be learnt."""
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(number))
    return x, x.flip(1).sin()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def settings(precision: str, backend: str | None = None, **sections: Any) -> dict[str, Any]:
    """A configuration; underscores in the names of sections stand for hyphens."""
    named: dict[str, Any] = {"device": "cpu", "mixed_precision": precision, "collective_timeout": 20}
    if backend is not None:
        named["backend"] = backend
    return {**named, **{name.replace("_", "-"): section for name, section in sections.items()}}


def full(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full weights; complete on rank 0."""
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def gradients(model: nn.Module) -> Tensor:
    """All of them, in one dimension."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def distance(found: Tensor, right: Tensor) -> float:
    """As a part of what is right."""
    return float((found.float() - right).norm() / right.norm())


def far(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The distance of two sets of weights, as a part of their size."""
    assert set(found) == set(right)
    names = sorted(right)
    return distance(torch.cat([found[n].flatten() for n in names]), torch.cat([right[n].flatten() for n in names]))


def train(steps: int, first: int = 0, accelerator: Any = None, objects: Any = None) -> Any:
    """A loop in which each rank has batches of its own; losses, the Accelerator, model and optimizer."""
    from drivetrain import Accelerator

    accelerator = accelerator or Accelerator()
    if objects is None:
        model = net()
        objects = accelerator.prepare(model, adamw(model))
    model, optimizer = objects
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step * accelerator.num_processes + accelerator.process_index)
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, accelerator, model, optimizer


def by_hand(steps: int, ranks: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain torch in one process, in float32: mean losses of all ranks, and weights."""
    model = net()
    optimizer = adamw(model)
    losses = []
    for step in range(steps):
        batches = [batch(step * ranks + rank) for rank in range(ranks)]
        loss = mse_loss(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())
