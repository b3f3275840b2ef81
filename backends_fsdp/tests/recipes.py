"""What the tests of this member train: a small net with everything that is awkward to cut, and the same by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH, CLASSES, ROWS = 6, 3, 4
VERSIONS = ["fsdp", "fsdp1"]
BOTH = pytest.mark.parametrize("backend", VERSIONS)
UNITS = {"transformer_classes": "Block"}
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    """Counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    """Sizes that no number of ranks above one divides, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale + self.shift


def net(seed: int = 0) -> Net:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return Net()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 5, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def joined(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Several batches as one."""
    batches = [batch(number) for number in numbers]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Updates are in proportion to gradients, so that a wrong factor shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Has two tensors of state for each parameter."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def settings(backend: str, precision: str = "no", **section: Any) -> dict[str, Any]:
    """The configuration of a run."""
    return {"backend": backend, "device": "cpu", "mixed_precision": precision, backend: section}


def train_steps(
    accelerator: Any, model: nn.Module, optimizer: Any, steps: int, clip: float | None = None, start: int = 0
) -> list[tuple[float, float | None]]:
    """Train, every rank on batches of its own; losses, and norms before clipping."""
    seen = []
    for step in range(start, start + steps):
        x, y = batch(step * accelerator.num_processes + accelerator.process_index)
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        norm = None if clip is None else accelerator.clip_grad_norm_(model.parameters(), clip).item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm))
    return seen


def full(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights, on rank 0."""
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@attrs.frozen
class ByHand:
    """What one process makes of the batches of all ranks."""

    weights: dict[str, Tensor]
    norms: list[float]


def by_hand(
    steps: int, ranks: int = 2, make: Make = sgd, clip: float | None = None, model: nn.Module | None = None
) -> ByHand:
    """The oracle of :func:`train_steps`: plain torch."""
    model, norms = model or net(), []
    optimizer = make(model)
    for step in range(steps):
        x, y = joined(list(range(step * ranks, (step + 1) * ranks)))
        cross_entropy(model(x), y).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return ByHand(model.state_dict(), norms)


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    """Compare weights, by name."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
