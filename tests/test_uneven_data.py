"""Loops in which ranks run out of batches, or reduce gradients and weights at other times than usual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.testing.pool import WorkerError
from tests.one_weight import OneWeight, Values


def train_uneven(values: Sequence[float], override: bool | None, even: bool) -> dict[str, Any]:
    """Train in the context; the weight, and the loader's length before, in and after the context."""
    from drivetrain import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    model = OneWeight(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Values(values), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    lengths = [len(loader)]
    with accelerator.join_uneven_inputs([model], even_batches=override):
        lengths.append(len(loader))
        batches = 0
        for x in loader:
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    lengths.append(len(loader))
    return {"w": accelerator.unwrap_model(model).w.item(), "batches": batches, "lengths": lengths}


def test_ranks_with_fewer_batches_wait_and_end_with_the_same_weights(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(train_uneven, [1.0, 2.0, 3.0], None, False)
    # By hand: (1 + 2) / 2, then 3 / 2, since a gradient is divided by all ranks.
    assert (one["w"], other["w"]) == (-2.0, -2.0)
    assert (one["batches"], other["batches"]) == (2, 1)


def join(which: str) -> None:
    from drivetrain import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    original = OneWeight(1.0)
    prepared = accelerator.prepare(original)
    with accelerator.join_uneven_inputs({"one": prepared, "original": [original], "text": ["model"]}[which]):
        pass


def test_only_what_prepare_returned_is_joined(worker_pool: Any) -> None:
    worker_pool(2).run(join, "one")
    with pytest.raises(WorkerError, match="DrivetrainError: this OneWeight is the model that was given to prepare"):
        worker_pool(2).run(join, "original")
    with pytest.raises(WorkerError, match="TypeError: join_uneven_inputs takes prepared models; got str"):
        worker_pool(2).run(join, "text")


def test_even_batches_is_overridden_in_the_context_only(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(train_uneven, [1.0, 2.0, 3.0], False, True)
    assert (one["w"], other["w"]) == (-2.0, -2.0)
    assert (one["lengths"], other["lengths"]) == ([2, 2, 2], [2, 1, 2])
    one, other = worker_pool(2).run(train_uneven, [1.0, 2.0, 3.0], True, False)
    assert (one["w"], other["w"]) == (-2.5, -2.5)  # the second gradient is (3 + 1) / 2
    assert (one["lengths"], other["lengths"]) == ([2, 2, 2], [1, 2, 1])


def test_a_single_process_joins_nobody(worker_pool: Any) -> None:
    (found,) = worker_pool(1).run(train_uneven, [1.0, 2.0, 3.0], False, True)
    assert (found["w"], found["batches"]) == (-5.0, 3)


class Numbers(IterableDataset[Tensor]):
    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return iter([torch.tensor(value) for value in self.values])


def train_uneven_with_momentum(stream: bool) -> list[Any]:
    """An uneven epoch under Adam and a schedule, then an even one: whatever a rank missed would show in the weights."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = OneWeight(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    loader = DataLoader(Numbers(values) if stream else Values(values), batch_size=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for even in (False, True):
        with accelerator.join_uneven_inputs([model], even_batches=even):
            for x in loader:
                accelerator.backward(model(x))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen += [accelerator.unwrap_model(model).w.item(), optimizer.param_groups[0]["lr"]]
    return [*seen, {key: float(value) for key, value in next(iter(optimizer.state.values())).items()}]


@pytest.mark.parametrize("stream", [False, True])
def test_optimizers_and_schedulers_are_equal_after_uneven_data(worker_pool: Any, stream: bool) -> None:
    one, other = worker_pool(2).run(train_uneven_with_momentum, stream)
    assert one == other
    assert one[-1]["step"] == 6.0


def join_and_accumulate() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(OneWeight())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        pass


def test_uneven_data_and_accumulation_are_refused_together(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match="gradient_accumulation_steps=2 can't be combined with uneven"):
        worker_pool(2).run(join_and_accumulate)


def switch_even_batches() -> list[int]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare(DataLoader(Values(range(3))))
    accelerator.even_batches = False
    second = accelerator.prepare(DataLoader(Values(range(3))))
    return [len(first), len(second)]


def test_even_batches_can_be_switched_for_loaders_to_come(worker_pool: Any) -> None:
    assert worker_pool(2).run(switch_even_batches) == [[2, 2], [2, 1]]


# ------------------------------------------------------------------------------------------- when gradients are reduced


def reduce_late() -> list[float]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(OneWeight(1.0))
    x = torch.tensor(accelerator.process_index + 1.0)
    with accelerator.no_sync(model):
        losses = [model(x), model(10 * x)]
        accelerator.backward(losses[0])
        apart = accelerator.unwrap_model(model).w.grad.item()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
    return [apart, accelerator.unwrap_model(model).w.grad.item()]


def test_gradients_of_forwards_kept_apart_are_reduced_by_a_triggered_backward(worker_pool: Any) -> None:
    assert worker_pool(1).run(reduce_late) == [[1.0, 11.0]]
    assert worker_pool(2).run(reduce_late) == [[1.0, 16.5], [2.0, 16.5]]


def train_locally(steps: int | None, enabled: bool) -> list[float]:
    from drivetrain import Accelerator, LocalSGD

    accelerator = Accelerator(cpu=True)
    model = OneWeight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=steps, enabled=enabled) as local:
        for _ in range(3):
            accelerator.backward(model(torch.tensor(accelerator.process_index + 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(accelerator.unwrap_model(model).w.item())
    return [*seen, accelerator.unwrap_model(model).w.item()]


def test_local_updates_are_averaged_every_few_steps_and_at_the_end(worker_pool: Any) -> None:
    assert worker_pool(2).run(train_locally, 2, True) == [[-1.0, -3.0, -4.0, -4.5], [-2.0, -3.0, -5.0, -4.5]]
    assert worker_pool(2).run(train_locally, 2, False) == [[-1.5, -3.0, -4.5, -4.5]] * 2
    assert worker_pool(2).run(train_locally, None, False) == [[-1.5, -3.0, -4.5, -4.5]] * 2
    assert worker_pool(1).run(train_locally, 2, True) == [[-1.0, -2.0, -3.0, -3.0]]


def test_local_updates_that_are_never_averaged_are_refused(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match="local_sgd_steps must be at least 1; got None"):
        worker_pool(1).run(train_locally, None, True)
