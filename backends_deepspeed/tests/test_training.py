"""Training on real ranks against plain torch in one process on all of their data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends_deepspeed.tests.recipes import (
    by_hand,
    close,
    full,
    grouped,
    loss_of,
    net,
    parameters_of,
    settings,
    train,
)
from drivetrain.testing.pool import WorkerError, WorkerPool
from drivetrain_deepspeed import ops

STAGES = [0, 1, 2, 3]
ZERO = [1, 2, 3]
LIMIT = 60.0
"""Seconds. The first task of a worker imports the engine."""

needs_adam = pytest.mark.skipif("cpu_adam" not in ops.built(), reason="run python -m drivetrain_deepspeed.ops first")


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_and_clipped_steps_equal_one_process_on_the_joined_batches(ranks: WorkerPool, stage: int) -> None:
    weights, norms = by_hand(3, 2, steps=2, clip=0.1)
    for found, theirs in ranks.run(train, 3, 2, torch.optim.AdamW, 0.1, size=2, config=settings(stage), timeout=LIMIT):
        if found:
            close(found, weights)
        assert theirs == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_may_be_called_several_times_before_a_step(ranks: WorkerPool, stage: int) -> None:
    found, _ = ranks.run(train, 3, 1, torch.optim.AdamW, 0.0, True, size=2, config=settings(stage), timeout=LIMIT)[0]
    close(found, by_hand(3, 2)[0])


@pytest.mark.parametrize("stage", ZERO)
def test_half_precision_follows_full_precision(ranks: WorkerPool, stage: int) -> None:
    found, _ = ranks.run(train, 3, 2, size=2, config=settings(stage, "bf16"), timeout=LIMIT)[0]
    assert {value.dtype for value in found.values()} == {torch.float32}
    close(found, by_hand(3, 2, steps=2)[0], 0.02)


@needs_adam
@pytest.mark.parametrize(
    ("stage", "section"),
    [
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
    ids=["optimizer at 2", "optimizer at 3", "both at 3"],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_offloading_keeps_the_optimizers_hyper_parameters(
    ranks: WorkerPool, stage: int, section: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    config = settings(stage, **section)
    found, norms = ranks.run(train, 3, 2, kind, 0.1, size=2, config=config, timeout=LIMIT)[0]
    weights, right = by_hand(3, 2, steps=2, kind=kind, clip=0.1)
    close(found, weights, 2e-6)
    assert norms == pytest.approx(right, rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- clipping


def configured(updates: int) -> dict[str, Tensor]:
    return train(updates)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_configured_norm_holds_in_every_update(ranks: WorkerPool, stage: int) -> None:
    config = settings(stage, gradient_clipping=0.05)
    found = ranks.run(configured, 3, size=2, config=config, timeout=LIMIT)[0]
    close(found, by_hand(3, 2, clip=0.05)[0])


# -------------------------------------------------------------------------------------------------------- what is held


def held() -> tuple[list[int], list[int], list[list[int]]]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, grouped(model))
    inner = accelerator.unwrap_model(model)
    zero = model.optimizer
    masters = zero.fp32_partitioned_groups_flat if hasattr(zero, "fp32_partitioned_groups_flat") else None
    if masters is None:
        masters = zero.single_partition_of_fp32_groups
    local = list(parameters_of(inner)) if hasattr(inner.scale, "to_local") else [p.numel() for p in inner.parameters()]
    shapes = [[id(p) in set(map(id, inner.parameters())) for p in group["params"]] for group in optimizer.param_groups]
    return local, [master.numel() for master in masters], shapes


@pytest.mark.parametrize("stage", ZERO)
def test_each_rank_holds_its_part_and_the_optimizer_shows_the_users_parameters(ranks: WorkerPool, stage: int) -> None:
    everyone = ranks.run(held, size=2, config=settings(stage), timeout=LIMIT)
    whole = [parameter.numel() for parameter in net().parameters()]
    trained = sum(parameter.numel() for parameter in net().parameters() if parameter.requires_grad)
    locals_, masters, groups = zip(*everyone, strict=True)
    assert groups == ([[True, True], [True, True]],) * 2
    if stage == 3:
        assert [sum(parts) for parts in zip(*locals_, strict=True)] == whole
        assert all(sum(part) < sum(whole) for part in locals_)
    else:
        assert list(locals_) == [whole, whole]
    sizes = [sum(master) for master in masters]
    assert trained <= sum(sizes) < trained + 16  # what the engine adds so that parts are equal
    assert max(sizes) <= trained // 2 + 8


def built_in_parts() -> tuple[list[int], bool]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    with accelerator.init_context():
        model = net(seed=accelerator.process_index)
    early = [parameter.ds_tensor.numel() for parameter in model.parameters()]
    model, optimizer = accelerator.prepare(model, grouped(model))
    accelerator.backward(loss_of(model, accelerator.process_index))
    optimizer.step()
    state = full(accelerator, model)
    return early, not state or bool(torch.isfinite(state["first.weight"]).all())


def test_stage_3_cuts_a_model_while_it_is_built(ranks: WorkerPool) -> None:
    whole = [parameter.numel() for parameter in net().parameters()]
    for early, fine in ranks.run(built_in_parts, size=2, config=settings(3), timeout=LIMIT):
        assert early == [-(-size // 2) for size in whole]
        assert fine


# ------------------------------------------------------------------------------------------------------- several models


def adversaries(updates: int) -> list[dict[str, Tensor]]:
    """Two models trained in turns, the second through the first, and a third that is never trained."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    models: list[Any] = [net(1), net(2)]
    optimizers: list[Any] = [grouped(model) for model in models]
    judge = accelerator.prepare(net(3).requires_grad_(False)).eval()
    models[0], models[1], optimizers[0], optimizers[1] = accelerator.prepare(*models, *optimizers)
    for update in range(updates):
        number = update * accelerator.num_processes + accelerator.process_index
        accelerator.backward(loss_of(models[0], number))
        optimizers[0].step()
        optimizers[0].zero_grad()
        accelerator.backward(loss_of(lambda x: judge(models[1](models[0](x))), number))
        optimizers[1].step()
        optimizers[1].zero_grad()
        optimizers[0].zero_grad()  # what the second loss left in the first model is not used
    return [full(accelerator, model) for model in (*models, judge)]


def adversaries_by_hand(updates: int, ranks: int) -> list[dict[str, Tensor]]:
    models, judge = [net(1), net(2)], net(3)
    optimizers = [grouped(model) for model in models]
    for update in range(updates):
        numbers = range(update * ranks, (update + 1) * ranks)
        for number in numbers:
            (loss_of(models[0], number) / ranks).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        for number in numbers:
            (loss_of(lambda x: judge(models[1](models[0](x))), number) / ranks).backward()  # type: ignore[arg-type]
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [dict(model.state_dict()) for model in (*models, judge)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_models_train_in_turns_and_a_third_is_only_asked(ranks: WorkerPool, stage: int) -> None:
    found = ranks.run(adversaries, 3, size=2, config=settings(stage), timeout=LIMIT)[0]
    for own, right in zip(found, adversaries_by_hand(3, 2), strict=True):
        close(own, right)


def side_by_side(updates: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Two models with losses of their own, each clipped before the other's backward."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    models: list[Any] = [net(1), net(2)]
    optimizers: list[Any] = [grouped(model) for model in models]
    models[0], models[1], optimizers[0], optimizers[1] = accelerator.prepare(*models, *optimizers)
    norms = []
    for update in range(updates):
        for model in models:
            accelerator.backward(loss_of(model, update * accelerator.num_processes + accelerator.process_index))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [full(accelerator, model) for model in models], norms


@pytest.mark.parametrize("stage", STAGES)
def test_models_are_clipped_one_after_the_other(ranks: WorkerPool, stage: int) -> None:
    found, norms = ranks.run(side_by_side, 2, size=2, config=settings(stage), timeout=LIMIT)[0]
    right: list[float] = []
    models = [net(1), net(2)]
    optimizers = [grouped(model) for model in models]
    for update in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            for number in (2 * update, 2 * update + 1):
                (loss_of(model, number) / 2).backward()
            right.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx(right, rel=1e-5)
    for own, model in zip(found, models, strict=True):
        close(own, dict(model.state_dict()))


# ---------------------------------------------------------------------------------------------------------- what fails


def misuse(how: str) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model, other = net(), net(1)
    if how == "one optimizer over two models":
        accelerator.prepare(model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    if how == "two optimizers for one model":
        accelerator.prepare(
            model,
            torch.optim.SGD(model.first.parameters(), lr=0.1),
            torch.optim.SGD(model.tied.parameters(), lr=0.1),
        )
    if how == "an optimizer after its model":
        accelerator.prepare(model)
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = accelerator.prepare(model, grouped(model))
    if how == "a closure":
        optimizer.step(lambda: loss_of(model, 0))
    if how == "the optimizer's own state":
        optimizer.state_dict()
    if how == "the model inside of the engine":
        accelerator.backward(loss_of(accelerator.unwrap_model(model), 0))
    accelerator.backward(loss_of(model, 0))
    if how == "clipping another's parameters":
        accelerator.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
    if how == "adding after clipping":
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        accelerator.backward(loss_of(model, 0))
    if how == "a group too many":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one optimizer over two models", "SGD holds parameters of 2 models"),
        ("two optimizers for one model", "Net has two optimizers"),
        ("an optimizer after its model", "pass both to prepare in one call"),
        ("a closure", "closure"),
        ("the optimizer's own state", "accelerator.save_state()"),
        ("the model inside of the engine", "come from outside of its forward"),
        ("clipping another's parameters", "2 of the 2 parameters to be clipped"),
        ("adding after clipping", "were clipped and not applied yet"),
        ("a group too many", "has 3 parameter groups, and had 2"),
    ],
)
def test_what_the_engine_cannot_do_is_the_same_error_on_every_rank(ranks: WorkerPool, how: str, message: str) -> None:
    with pytest.raises(WorkerError) as raised:
        ranks.run(misuse, how, size=2, config=settings(2), timeout=LIMIT)
    assert len(raised.value.errors) == 2
    for error in raised.value.errors:
        assert message in error.message


# ----------------------------------------------------------------------------------------------- branches not taken


class Branches(nn.Module):
    """One of two layers is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.common(x).tanh())


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


TAKEN = [0, 1, 1, 0, 1]


def take_branches() -> dict[str, Tensor]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for number, branch in enumerate(TAKEN):
        torch.manual_seed(number * accelerator.num_processes + accelerator.process_index)
        accelerator.backward(model(torch.randn(3, 4), branch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return full(accelerator, model)


def branches_by_hand(ranks: int) -> dict[str, Tensor]:
    model = branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, branch in enumerate(TAKEN):
        for rank in range(ranks):
            torch.manual_seed(number * ranks + rank)
            (model(torch.randn(3, 4), branch).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("stage", "section"),
    [*((stage, {}) for stage in STAGES), *((stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (2, 3))],
    ids=lambda value: str(value) if isinstance(value, int) else "offloaded" if value else "",
)
def test_a_layer_that_was_not_used_is_not_moved_by_an_older_gradient(
    ranks: WorkerPool, stage: int, section: dict[str, Any]
) -> None:
    found = ranks.run(take_branches, size=2, config=settings(stage, **section), timeout=LIMIT)[0]
    close(found, branches_by_hand(2))
