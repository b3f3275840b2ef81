"""Group *numerics*, second part: when an update happens, in small whole numbers that every format holds exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.subject import Subject
from drivetrain.testing.conformance.training import several_models

__all__ = ["checks"]

checks = CheckList("numerics")

SPELLINGS = (
    "block, zero_grad last",
    "block, zero_grad first",
    "plain loop, zero_grad last",
    "plain loop, zero_grad first",
)


class Numbers(Dataset[Tensor]):
    """Each value once for every shard, so that all shards see the same."""

    def __init__(self, values: Sequence[float], shards: int) -> None:
        self.values = [value for value in values for _ in range(shards)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.values[index]])


def one_weight(start: float) -> nn.Module:
    """The model w * x."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


def weight(accelerator: Any, model: nn.Module) -> float:
    """The weight of such a model; on rank 0 for certain, else NaN."""
    state = accelerator.get_state_dict(model)
    return float(state["weight"]) if state else math.nan


def spell(spelling: str, values: Sequence[float], start: float, steps: int, bad: float | None = None) -> list[float]:
    """The weight after each update, for the loss w * x with SGD and learning rate 1. A bad value is dropped."""
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = one_weight(start)
    loader = DataLoader(Numbers(values, accelerator.run.world.data_size), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, SGD(model.parameters(), lr=1.0), loader)
    after = []

    def micro_batch(x: Tensor) -> None:
        if spelling.endswith("first"):
            optimizer.zero_grad()
        accelerator.backward(model(x).mean())
        if x.flatten()[0].item() == bad:
            optimizer.zero_grad()
            return
        optimizer.step()
        if spelling.endswith("last"):
            optimizer.zero_grad()

    for x in loader:
        if spelling.startswith("block"):
            with accelerator.accumulate(model):
                micro_batch(x)
        else:
            micro_batch(x)
        if accelerator.sync_gradients:
            after.append(weight(accelerator, model))
    return after


@checks("every spelling of the accumulation loop gives the same updates")
def spellings(subject: Subject) -> None:
    for spelling in SPELLINGS:
        found = subject.run(spell, spelling, [1.0, 2.0, 3.0, 4.0], 1.0, 2)[0]
        expect(found, [-0.5, -4.0], f"w after two groups of two ({spelling}), from w=1 with the loss w*x, x=1..4")


@checks("every spelling of the loop divides a short last group by its own size")
def short_groups(subject: Subject) -> None:
    for spelling in SPELLINGS:
        found = subject.run(spell, spelling, [1.0] * 5, 0.0, 2)[0]
        expect(found, [-1.0, -2.0, -3.0], f"w after groups of 2, 2 and 1 ({spelling}), from w=0 with the loss w*1")


@checks("zero_grad clears a bad batch that was never stepped on")
def dropped(subject: Subject) -> None:
    for spelling in SPELLINGS[::2]:
        found = subject.run(spell, spelling, [1.0, 64.0, 2.0], 0.0, 1, 64.0)[0]
        expect(found, [-1.0, -1.0, -3.0], f"w after x=1, a dropped x=64, and x=2 ({spelling}), from w=0")


# -------------------------------------------------------------------------------------------------------- reduction


def nothing_to_round(subject: Subject) -> str | None:
    """Why it can't be told in which dtype gradients are reduced."""
    policy = subject.facts.policy
    if policy.reduce_dtype is None:
        return "the precision leaves gradients in their own dtype while they are reduced"
    if subject.facts.data_size == 1:
        return "one shard has nothing to reduce"
    if policy.compute_dtype is not None or policy.reduce_dtype.itemsize >= torch.float32.itemsize:
        return f"gradients fit into {policy.reduce}, in which the precision has them reduced"
    return None


@checks("gradients are reduced in the dtype that the precision names", unclaimed=nothing_to_round)
def reduced(subject: Subject) -> None:
    dtype: Any = subject.facts.policy.reduce_dtype
    gradient = 1.0 + torch.finfo(dtype).eps / 4
    (found,) = subject.run(spell, SPELLINGS[0], [gradient], 0.0, 1)[0]
    if torch.tensor(found).to(dtype).item() != found or abs(found + 1.0) > torch.finfo(dtype).eps:
        raise Violation(f"w is {found!r} after a gradient of {gradient!r}, which is 1 in {dtype}, from w=0 with lr 1")


# ---------------------------------------------------------------------------------------------------- loss scaling


def scales_losses(subject: Subject) -> str | None:
    """Why there is no overflow to skip an update for."""
    return "the precision scales no losses" if subject.facts.policy.loss_scale is None else None


@attrs.frozen
class Turn:
    """What became of one update."""

    weights: list[float]
    skipped: list[bool]
    moved: list[int]
    """Steps of each scheduler so far, in updates."""


def overflow(factors: Sequence[Sequence[float]], only_rank: int | None = None) -> list[Turn]:
    """Train models side by side on w * 1; in each update the loss of a model is multiplied by a factor.

    Args:
        factors: By update, then by model; an infinite one overflows.
        only_rank: The rank whose losses are multiplied, the others' stay; None: all.
    """
    from drivetrain import Accelerator

    accelerator = Accelerator()
    models: list[Any] = [one_weight(0.0) for _ in factors[0]]
    optimizers: list[Any] = [SGD(model.parameters(), lr=1.0) for model in models]
    schedulers: list[Any] = [LambdaLR(optimizer, lambda _: 1.0) for optimizer in optimizers]
    count = len(models)
    made = accelerator.prepare(*models, *optimizers, *schedulers)
    models, optimizers, schedulers = list(made[:count]), list(made[count : 2 * count]), list(made[2 * count :])
    x = torch.ones(1, 1, device=accelerator.device)
    mine = only_rank in (None, accelerator.process_index)
    turns = []
    for update in factors:
        with accelerator.accumulate(*models):
            for model, factor in zip(models, update, strict=True):
                accelerator.backward(model(x).mean() * (factor if mine else 1.0))
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        turns.append(
            Turn(
                [weight(accelerator, model) for model in models],
                [optimizer.step_was_skipped for optimizer in optimizers],
                [scheduler.last_epoch // accelerator.run.world.data_size for scheduler in schedulers],
            )
        )
    return turns


@checks(
    "an update whose gradients overflow is skipped, and zero_grad clears them for the next", unclaimed=scales_losses
)
def skip(subject: Subject) -> None:
    found = subject.run(overflow, [[1.0], [math.inf], [1.0]])[0]
    expect([turn.weights for turn in found], [[-1.0], [-1.0], [-2.0]], "w after an update, an overflow and an update")
    expect([turn.skipped for turn in found], [[False], [True], [False]], "step_was_skipped")
    expect([turn.moved for turn in found], [[1], [1], [2]], "updates the scheduler counted")


@checks("an overflow on one rank skips the update on all", unclaimed=scales_losses)
def skip_everywhere(subject: Subject) -> None:
    ranks = subject.run(overflow, [[math.inf], [1.0]], subject.size - 1)
    expect([turn.weights for turn in ranks[0]], [[0.0], [-1.0]], "w after an overflow on the last rank and an update")
    for rank, turns in enumerate(ranks):
        expect([turn.skipped for turn in turns], [[True], [False]], f"step_was_skipped on rank {rank}")


def scales_several(subject: Subject) -> str | None:
    """Why two optimizers can't overflow apart from each other."""
    return scales_losses(subject) or several_models(subject)


@checks("of two optimizers only the one that overflows is skipped, with its scheduler", unclaimed=scales_several)
def skip_one(subject: Subject) -> None:
    found = subject.run(overflow, [[1.0, math.inf], [1.0, 1.0]])[0]
    expect([turn.weights for turn in found], [[-1.0, 0.0], [-2.0, -1.0]], "weights after one overflow of two")
    expect([turn.skipped for turn in found], [[False, True], [False, False]], "step_was_skipped")
    expect([turn.moved for turn in found], [[1, 0], [2, 1]], "updates the schedulers counted")


@checks("a scheduler moves with every update, by as many steps as there are data shards")
def scheduler(subject: Subject) -> None:
    found = subject.run(overflow, [[1.0], [1.0], [1.0]])[0]
    expect([turn.moved for turn in found], [[1], [2], [3]], "steps of the scheduler, divided by the data shards")
    expect([turn.weights for turn in found], [[-1.0], [-2.0], [-3.0]], "w after each update")
