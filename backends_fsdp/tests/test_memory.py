"""What a rank holds, what is computed twice to hold less, and models that are built on one rank alone."""

from __future__ import annotations

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
    train_steps,
)

# ----------------------------------------------------------------------------------------------------- it really shards


class Wide(nn.Module):
    """Nothing but matrices whose rows every number of ranks here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def held_bytes() -> tuple[int, int, bool]:
    """Bytes of the memory behind this rank's parameters, and behind its optimizer state; whether parts are claimed."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(2, 64)).sum())
    optimizer.step()

    def memory(tensors: Any) -> int:
        locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        behind = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_ if t.numel()}
        return sum(behind.values())

    state = [value for entries in optimizer.state.values() for value in entries.values() if value.dim()]
    return memory(model.parameters()), memory(state), accelerator.run.capabilities.shards_params


@pytest.mark.parametrize(
    ("backend", "ranks", "section", "parts"),
    [
        ("fsdp", 2, {}, 2),
        ("fsdp", 4, {"transformer_classes": "Linear"}, 4),
        ("fsdp", 4, {"replicate_size": 2}, 2),
        ("fsdp", 2, {"replicate_size": 2}, 1),
        ("fsdp1", 2, {}, 2),
        ("fsdp1", 4, {"transformer_classes": "Linear"}, 4),
        ("fsdp1", 4, {"replicate_size": 2}, 2),
        ("fsdp1", 2, {"sharding_strategy": "no_shard"}, 1),
    ],
)
def test_parameters_and_optimizer_state_of_a_rank_take_a_part_of_the_memory(
    worker_pool: Any, backend: str, ranks: int, section: dict[str, Any], parts: int
) -> None:
    whole = 3 * 64 * 64 * 4
    expected = (whole // parts, 2 * whole // parts, parts > 1)
    assert worker_pool(ranks).run(held_bytes, config=settings(backend, **section)) == [expected] * ranks


def recomputed() -> list[int]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(net())
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    x, y = batch(0)
    accelerator.backward(cross_entropy(model(x), y))
    with torch.no_grad():
        model(x)
    return [block.calls for block in model.blocks] + [len(calls)]


@BOTH
def test_activation_checkpointing_recomputes_the_units_alone(worker_pool: Any, backend: str) -> None:
    # Forward, again in backward, and once in evaluation.
    on, off = {**UNITS, "activation_checkpointing": True}, UNITS
    assert worker_pool(2).run(recomputed, config=settings(backend, **on)) == [[3, 3, 2]] * 2
    assert worker_pool(2).run(recomputed, config=settings(backend, **off)) == [[2, 2, 2]] * 2


def after_evaluation() -> bool:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model, optimizer = net(), None
    model, optimizer = accelerator.prepare(model, sgd(model))
    with torch.no_grad():
        model(batch(0)[0])
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {id(p) for p in model.parameters()} == known


@BOTH
def test_after_an_evaluation_the_parameters_are_those_the_optimizer_knows(worker_pool: Any, backend: str) -> None:
    assert worker_pool(2).run(after_evaluation, config=settings(backend)) == [True, True]


def meta_model() -> list[Any]:
    """Only rank 0 has values until prepare; what was on meta gets them, buffers included."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    with accelerator.init_context():
        model = net(seed=accelerator.process_index)
        reference = nn.BatchNorm1d(3)
    meta = {parameter.is_meta for parameter in model.parameters()}
    model, optimizer = accelerator.prepare(model, sgd(model))
    x, y = batch(accelerator.process_index)
    accelerator.backward(cross_entropy(model(x), y))
    optimizer.step()
    whole = accelerator.prepare_model(reference, evaluation_mode=True)
    return [meta, full(accelerator, model), whole.weight.is_meta, whole.running_var.tolist()]


@BOTH
def test_models_built_on_rank_0_alone_are_completed_by_prepare(worker_pool: Any, backend: str) -> None:
    section = {**UNITS, "cpu_ram_efficient_loading": True}
    first, second = worker_pool(2).run(meta_model, config=settings(backend, **section))
    assert (first[0], second[0]) == ({False}, {True})
    close(first[1], by_hand(1).weights)
    assert first[2:] == second[2:] == [False, [1.0, 1.0, 1.0]]


def prepare_with_state() -> Any:
    """An optimizer that has stepped before it is prepared."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = joined([50])
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    train_steps(accelerator, model, optimizer, 2)
    return full(accelerator, model)


@BOTH
def test_state_an_optimizer_had_before_is_cut_too(worker_pool: Any, backend: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in [joined([50]), joined([0, 1]), joined([2, 3])]:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(worker_pool(2).run(prepare_with_state, config=settings(backend, **UNITS))[0], model.state_dict(), 2e-5)
