"""More than one model in the life of a run: freed, prepared anew, and trained by several Accelerators."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from backends_fsdp.tests.recipes import (
    BOTH,
    UNITS,
    adamw,
    batch,
    by_hand,
    close,
    full,
    net,
    settings,
    train_steps,
)


def live_bytes() -> int:
    """Bytes of memory behind all tensors of this process."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = (thing.to_local() if hasattr(thing, "to_local") else thing).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def free_and_begin_again() -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    before = live_bytes()
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    train_steps(accelerator, model, optimizer, 2)
    with torch.no_grad():
        model(batch(0)[0])
    held = live_bytes() - before
    bare = accelerator.unwrap_model(model)
    watched = {"model": weakref.ref(model), "module": weakref.ref(bare), "optimizer": weakref.ref(optimizer.optimizer)}
    watched |= {name: weakref.ref(parameter) for name, parameter in bare.named_parameters()}
    del bare
    model, optimizer = accelerator.free_memory(model, optimizer)
    left = live_bytes() - before
    alive = [name for name, reference in watched.items() if reference() is not None]
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    train_steps(accelerator, model, optimizer, 2)
    return held > 0, left, alive, full(accelerator, model)


@BOTH
def test_free_memory_frees_models_and_state_and_the_run_goes_on_with_others(worker_pool: Any, backend: str) -> None:
    for held, left, alive, weights in worker_pool(2).run(free_and_begin_again, config=settings(backend, **UNITS)):
        assert (held, left, alive) == (True, 0, [])
        if weights:
            close(weights, by_hand(2, make=adamw).weights, 2e-5)


def by_turns() -> Any:
    """Two Accelerators, of which one accumulates: each counts its own micro-batches, and reduces its own model."""
    from torch.nn.functional import cross_entropy

    from drivetrain import Accelerator

    one, other = Accelerator(), Accelerator(gradient_accumulation_steps=2)
    model, critic = net(0), net(1)
    model, optimizer = one.prepare(model, adamw(model))
    critic, its = other.prepare(critic, adamw(critic))
    for step in range(3):
        for part in range(2):
            with other.accumulate(critic):
                x, y = batch(4 * step + 2 * part + other.process_index)
                other.backward(cross_entropy(critic(x), y))
                if part == 0:
                    train_steps(one, model, optimizer, 1, start=step)
                its.step()
                its.zero_grad()
    return full(one, model), full(other, critic)


@BOTH
def test_several_accelerators_train_by_turns(worker_pool: Any, backend: str) -> None:
    mine, theirs = worker_pool(2).run(by_turns, config=settings(backend, **UNITS))[0]
    close(mine, by_hand(3, make=adamw).weights, 2e-5)
    close(theirs, by_hand(3, ranks=4, make=adamw, model=net(1)).weights, 2e-5)
