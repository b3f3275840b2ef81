"""Loops in which forward and backward don't simply follow each other, against one process on the joined batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss

from backends_fsdp.tests.recipes import BOTH, Net, batch, close, full, joined, settings
from drivetrain.testing.logs import log_lines

Backward = Callable[[Tensor], Any]


class Spare(nn.Linear):
    """Used by no forward."""


class WithSpare(Net):
    """Of which a part takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Spare(4, 4)


def make() -> tuple[WithSpare, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = WithSpare()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


def two_forwards(model: nn.Module, first: Any, second: Any, backward: Backward) -> None:
    """One loss of two outputs."""
    backward(mse_loss(model(first[0]), model(second[0])))


def two_backwards(model: nn.Module, first: Any, second: Any, backward: Backward) -> None:
    """Two losses, one update."""
    backward(cross_entropy(model(first[0]), first[1]))
    backward(cross_entropy(model(second[0]), second[1]))


def evaluated_between(model: nn.Module, first: Any, second: Any, backward: Backward) -> None:
    """The model is its own teacher, asked between its forward and its backward."""
    output = model(first[0])
    with torch.no_grad():
        wanted = model(second[0])
    backward(mse_loss(output, wanted))


def never_backward(model: nn.Module, first: Any, second: Any, backward: Backward) -> None:
    """A forward whose loss is thrown away."""
    model(first[0])
    backward(cross_entropy(model(second[0]), second[1]))


LOOPS = {loop.__name__: loop for loop in (two_forwards, two_backwards, evaluated_between, never_backward)}


def run(name: str) -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*make())
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in range(3):
        first, second = (batch(ranks * (2 * step + which) + rank) for which in (0, 1))
        LOOPS[name](model, first, second, accelerator.backward)
        optimizer.step()
        optimizer.zero_grad()
    return full(accelerator, model)


@BOTH
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_update_is_that_of_one_process(worker_pool: Any, backend: str, name: str, again: bool) -> None:
    model, optimizer = make()
    for step in range(3):
        first, second = (joined([2 * (2 * step + which), 2 * (2 * step + which) + 1]) for which in (0, 1))
        LOOPS[name](model, first, second, Tensor.backward)
        optimizer.step()
        optimizer.zero_grad()
    # What fsdp1 flattens together with others has a gradient if one of them has: so the spare part is a unit.
    section = {"transformer_classes": "Block,Spare", "activation_checkpointing": again}
    found = worker_pool(2).run(run, name, config=settings(backend, **section))[0]
    close(found, model.state_dict(), 2e-5)
    assert torch.equal(found["spare.weight"], make()[0].spare.weight)  # no gradient, so no weight decay either


def test_what_takes_no_part_has_no_gradient_in_a_unit_with_others_either(worker_pool: Any) -> None:
    found = worker_pool(2).run(run, "two_forwards", config=settings("fsdp"))[0]
    assert torch.equal(found["spare.weight"], make()[0].spare.weight)


# ------------------------------------------------------------------------------------------------------ outside forward


class Penalised(nn.Module):
    """Has a method that computes a loss from a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def penalty(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def warnings_of_steps(through_method: bool) -> list[str]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = Penalised()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with log_lines() as said:
        for _ in range(2):
            x = torch.tensor(accelerator.process_index + 1.0)
            loss = model.penalty(x) if through_method else model(x).sum()
            accelerator.backward(loss.full_tensor() if isinstance(loss, DTensor) else loss)
            optimizer.step()
            optimizer.zero_grad()
    return [text for text in said if "outside of the model's forward" in text]


# At the other strategies of fsdp1 a method finds pieces in place of the parameters, and fails by itself.
UNCUT = pytest.mark.parametrize(("backend", "section"), [("fsdp", {}), ("fsdp1", {"sharding_strategy": "no_shard"})])


@UNCUT
def test_a_loss_computed_by_a_method_is_warned_of_once(worker_pool: Any, backend: str, section: dict[str, Any]) -> None:
    first, second = worker_pool(2).run(warnings_of_steps, True, config=settings(backend, **section))
    assert len(first) == 1
    assert "weight, a sharded parameter of Penalised" in first[0]
    assert second == [], "one rank speaks for all"


@pytest.mark.parametrize(
    ("backend", "section"), [("fsdp", {}), ("fsdp1", {}), ("fsdp1", {"sharding_strategy": "no_shard"})]
)
def test_forward_is_not_taken_for_a_method(worker_pool: Any, backend: str, section: dict[str, Any]) -> None:
    assert worker_pool(2).run(warnings_of_steps, False, config=settings(backend, **section)) == [[], []]
