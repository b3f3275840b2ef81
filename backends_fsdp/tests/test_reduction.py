"""When gradients are reduced, and by which norm they are clipped, against one process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from backends_fsdp.tests.recipes import (
    BOTH,
    UNITS,
    batch,
    by_hand,
    close,
    full,
    joined,
    net,
    settings,
    sgd,
)

# --------------------------------------------------------------------------------------------------------- accumulation


def one_weight(spelling: str) -> list[float]:
    """N=2, lr 1, loss w*x, x=1..4 on every rank, from w=1."""
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    numbers = torch.arange(1.0, 5.0).repeat_interleave(accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers.view(-1, 1), batch_size=1))
    seen = []
    for x in loader:
        block = accelerator.accumulate(model) if "block" in spelling else contextlib.nullcontext()
        with block:
            if "zero first" in spelling:
                optimizer.zero_grad()
            accelerator.backward(model(x).sum())
            optimizer.step()
            if "zero last" in spelling:
                optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        seen.append(state["weight"].item() if state else None)
    return seen


@BOTH
@pytest.mark.parametrize("spelling", ["plain, zero first", "plain, zero last", "block, zero first", "block, zero last"])
def test_the_four_spellings_of_accumulation_agree(worker_pool: Any, backend: str, spelling: str) -> None:
    assert worker_pool(2).run(one_weight, spelling, config=settings(backend))[0] == [1.0, -0.5, -0.5, -4.0]


def accumulate_and_count() -> dict[str, list[int]]:
    """Reductions of gradients in every micro-batch of a group of three."""
    from torch.distributed.tensor.debug import CommDebugMode

    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    counts = []
    for number in range(6):
        x, y = batch(number)
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            with CommDebugMode() as mode:
                accelerator.backward(loss)
            counts.append(sum(n for op, n in mode.get_comm_counts().items() if "reduce" in str(op)))
            optimizer.step()
            optimizer.zero_grad()
    return counts


@BOTH
def test_gradients_are_reduced_once_a_group(worker_pool: Any, backend: str) -> None:
    # Three units, and the scalar, which is no unit's.
    assert worker_pool(2).run(accumulate_and_count, config=settings(backend, **UNITS)) == [[0, 0, 4, 0, 0, 4]] * 2


def drop_a_group() -> Any:
    """Gradients that were added up and not yet reduced must go, too."""
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    x, y = batch(99)
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(x), y) * 1000)
        optimizer.zero_grad()  # a bad batch: no step was tried
    with accelerator.no_sync(model):
        accelerator.backward(cross_entropy(model(x), y) * 1000)
    optimizer.zero_grad()
    x, y = batch(accelerator.process_index)
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(x), y) * 2)
        optimizer.step()
    return full(accelerator, model)


@BOTH
def test_zero_grad_drops_what_was_not_reduced_yet(worker_pool: Any, backend: str) -> None:
    found = worker_pool(2).run(drop_a_group, config=settings(backend, **UNITS))
    close(found[0], by_hand(1).weights)


@BOTH
def test_zero_grad_drops_what_was_added_up_in_another_dtype(worker_pool: Any, backend: str) -> None:
    section = {**UNITS, "mixed_precision_policy": {"param_dtype": "bfloat16"}}
    found = worker_pool(2).run(drop_a_group, config=settings(backend, "bf16", **section))
    close(found[0], by_hand(1).weights, 0.02)


def trigger() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    x, y = batch(accelerator.process_index)
    with accelerator.no_sync(model):
        loss = cross_entropy(model(x), y)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
    optimizer.step()
    return full(accelerator, model)


@BOTH
def test_gradients_can_be_reduced_in_backward_after_a_forward_that_was_not_to(worker_pool: Any, backend: str) -> None:
    close(worker_pool(2).run(trigger, config=settings(backend, **UNITS))[0], by_hand(1).weights)


# ------------------------------------------------------------------------------------------------------------- clipping


def clip(norm_type: float, subset: bool) -> list[Any]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(net())
    x, y = batch(accelerator.process_index)
    accelerator.backward(cross_entropy(model(x), y))
    chosen = [p for name, p in model.named_parameters() if not subset or "blocks.1" in name or name == "scale"]
    norm = accelerator.clip_grad_norm_(chosen, 0.01, norm_type)
    again = accelerator.clip_grad_norm_(chosen, 1e9, norm_type)
    everything = accelerator.clip_grad_norm_(model.parameters(), 1e9, norm_type)
    return [type(norm), norm.shape, norm.item(), again.item(), everything.item()]


@BOTH
@pytest.mark.parametrize("subset", [False, True], ids=["all", "subset"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_by_the_global_norm(worker_pool: Any, backend: str, norm_type: float, subset: bool) -> None:
    model = net()
    x, y = joined([0, 1])
    cross_entropy(model(x), y).backward()
    chosen = [p for name, p in model.named_parameters() if not subset or "blocks.1" in name or name == "scale"]
    expected = [
        nn.utils.clip_grad_norm_(chosen, 0.01, norm_type).item(),
        nn.utils.clip_grad_norm_(chosen, 1e9, norm_type).item(),
        nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type).item(),
    ]
    for kind, shape, *found in worker_pool(2).run(clip, norm_type, subset, config=settings(backend, **UNITS)):
        assert (kind, shape) == (Tensor, ())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def clip_values() -> float:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(net())
    x, y = batch(accelerator.process_index)
    accelerator.backward(cross_entropy(model(x), y))
    accelerator.clip_grad_value_(model.parameters(), 0.003)
    return accelerator.clip_grad_norm_(model.parameters(), 1e9).item()


@BOTH
def test_clipping_by_value_clamps_every_element(worker_pool: Any, backend: str) -> None:
    model = net()
    x, y = joined([0, 1])
    cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.003)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    torch.testing.assert_close(
        worker_pool(2).run(clip_values, config=settings(backend, **UNITS)), [expected] * 2, rtol=1e-5, atol=0
    )
