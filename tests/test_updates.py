"""When an update happens: spellings of the loop, overflows, schedulers, unreduced gradients; in small whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

SPELLINGS = [
    "block, zero_grad last",
    "block, zero_grad first",
    "block in a block, zero_grad last",
    "plain, zero_grad last",
    "plain, zero_grad first",
]


class Numbers(Dataset[Tensor]):
    """Each value once for every rank, so that all ranks see the same."""

    def __init__(self, values: Sequence[float], ranks: int) -> None:
        self.values = [value for value in values for _ in range(ranks)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.values[index])


class OneWeight(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).mean()


def spell(spelling: str, values: Sequence[float], start: float, steps: int, bad: float | None = None) -> list[float]:
    """The weight after each micro-batch, for the loss w * x with SGD and lr 1."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = OneWeight(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Numbers(values, accelerator.num_processes), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    after = []

    def micro_batch(x: Tensor) -> None:
        if spelling.endswith("first"):
            optimizer.zero_grad()
        accelerator.backward(model(x))
        if x.item() == bad:
            optimizer.zero_grad()
            return
        optimizer.step()
        if spelling.endswith("last"):
            optimizer.zero_grad()

    for x in loader:
        if spelling.startswith("block in"):
            with accelerator.accumulate(model), accelerator.accumulate(model):
                micro_batch(x)
        elif spelling.startswith("block"):
            with accelerator.accumulate(model):
                micro_batch(x)
        else:
            micro_batch(x)
        after.append(accelerator.unwrap_model(model).w.item())
    return after


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_spellings_of_the_loop_give_the_same_weights(worker_pool: Any, ranks: int, spelling: str) -> None:
    found = worker_pool(ranks).run(spell, spelling, [1.0, 2.0, 3.0, 4.0], 1.0, 2)
    assert found == [[1.0, -0.5, -0.5, -4.0]] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_last_group_of_five_by_two_is_divided_by_one(worker_pool: Any, ranks: int, spelling: str) -> None:
    found = worker_pool(ranks).run(spell, spelling, [1.0] * 5, 0.0, 2)
    assert found == [[0.0, -1.0, -1.0, -2.0, -3.0]] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_bad_batch_can_be_dropped(worker_pool: Any, ranks: int, spelling: str) -> None:
    found = worker_pool(ranks).run(spell, spelling, [1.0, 100.0, 2.0], 0.0, 1, 100.0)
    assert found == [[-1.0, -1.0, -3.0]] * ranks


class Stream(IterableDataset[Tensor]):
    """The same values, of which nobody knows how many there will be."""

    def __init__(self, values: Sequence[float], ranks: int) -> None:
        self.numbers = Numbers(values, ranks)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.numbers[index] for index in range(len(self.numbers)))


def train_on_stream(values: Sequence[float]) -> list[float]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = OneWeight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Stream(values, accelerator.num_processes), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    after, norms = [], []
    for x in loader:
        accelerator.backward(model(x))
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        norms += [] if norm is None else [norm.item()]
        optimizer.step()
        optimizer.zero_grad()
        after.append(accelerator.unwrap_model(model).w.item())
    assert norms == [1.0, 1.0, 1.0]  # the short group is a mean before it is clipped
    return after


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_group_of_a_stream_is_a_mean_though_its_size_was_not_known(worker_pool: Any, ranks: int) -> None:
    assert worker_pool(ranks).run(train_on_stream, [1.0] * 5) == [[0.0, -1.0, -1.0, -2.0, -3.0]] * ranks


# ------------------------------------------------------------------------------------------------------------ overflows


def overflow_one(bad_rank: int) -> list[dict[str, Any]]:
    """Two models and optimizers under fp16; in step 2 of 4 the first one's loss overflows on one rank."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="fp16", scheduler_counts="updates")
    models = [OneWeight(1.0), OneWeight(1.0)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    a, b, oa, ob, sa, sb = accelerator.prepare(*models, *optimizers, *schedulers)
    log = []
    for step in range(4):
        overflows = step == 1 and accelerator.process_index == bad_rank
        x = torch.tensor([float("inf") if overflows else 1.0])
        accelerator.backward(a(x))
        accelerator.backward(b(torch.tensor([1.0])))
        for optimizer, scheduler in ((oa, sa), (ob, sb)):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        log.append(
            {
                "weights": [accelerator.unwrap_model(model).w.item() for model in (a, b)],
                "rates": [optimizer.param_groups[0]["lr"] for optimizer in (oa, ob)],
                "skipped": [optimizer.step_was_skipped for optimizer in (oa, ob)],
                "scale": accelerator.scaler.get_scale(),
            }
        )
    return log


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_stops_only_its_own_optimizer_and_scheduler_on_all_ranks(worker_pool: Any, ranks: int) -> None:
    found = worker_pool(ranks).run(overflow_one, ranks - 1)
    for log in found:
        assert [step["skipped"] for step in log] == [[False, False], [True, False], [False, False], [False, False]]
        assert [step["rates"] for step in log] == [
            [0.0625, 0.0625],
            [0.0625, 0.03125],
            [0.03125, 0.015625],
            [0.015625, 0.0078125],
        ]
        assert [step["weights"] for step in log] == [
            [0.875, 0.875],
            [0.875, 0.8125],
            [0.8125, 0.78125],
            [0.78125, 0.765625],
        ]
        assert log[-1]["scale"] == log[0]["scale"] / 2


# ----------------------------------------------------------------------------------------------------------- schedulers


def rates(counts: str, steps: int) -> list[float]:
    """Learning rates after each of 8 micro-batches, under StepLR that halves them."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, scheduler_counts=counts)
    model = OneWeight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(Numbers([1.0] * 8, accelerator.num_processes), batch_size=1)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    seen = []
    for x in loader:
        accelerator.backward(model(x))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])
    return seen


def test_a_scheduler_counts_updates_times_ranks_or_updates(worker_pool: Any) -> None:
    by_one = [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert worker_pool(1).run(rates, "shards", 2) == [by_one]
    assert worker_pool(2).run(rates, "updates", 2) == [by_one] * 2
    assert worker_pool(2).run(rates, "shards", 2) == [[rate**2 for rate in by_one]] * 2


# ------------------------------------------------------------------------------------------------- gradients kept apart


def without_sync() -> list[float]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(OneWeight(1.0))
    x = torch.tensor([accelerator.process_index + 1.0])
    with accelerator.no_sync(model):
        accelerator.backward(model(x))
    alone = accelerator.unwrap_model(model).w.grad.item()
    accelerator.backward(model(x))
    return [alone, accelerator.unwrap_model(model).w.grad.item()]


def test_no_sync_keeps_gradients_apart_until_the_next_backward(worker_pool: Any) -> None:
    assert worker_pool(2).run(without_sync) == [[1.0, 3.0], [2.0, 3.0]]
