"""Short trainings, once through the library on every rank and once by hand in plain torch.

The oracle never calls the library. Ranks report which samples were behind each update, and it trains on those, so it
needs to know nothing of how data is shared out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from drivetrain.testing.conformance.checks import Violation
from drivetrain.testing.conformance.subject import Subject

__all__ = ["Clip", "Recipe", "Samples", "Trained", "by_hand", "compare", "deviation", "follow", "mlp", "sgd", "train"]

WIDTH = 16
"""Of models and batches: matrix products in 8-bit formats want multiples of 16."""


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """Made-up samples that know their number."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.flip(1).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def mlp() -> nn.Module:
    """Two layers with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum, whose updates are in proportion to gradients: a wrong factor shows."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@attrs.frozen
class Clip:
    """How the gradients of one update are clipped."""

    max_norm: float
    norm_type: float = 2.0
    part: str = ""
    """Only parameters whose names begin so."""
    by_value: bool = False
    """Clamp each element to ``max_norm`` instead."""


@attrs.frozen(kw_only=True)
class Recipe:
    """What a training is made of; sent to the ranks and to the oracle alike. Functions are of top level."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    rows: int = WIDTH
    """Samples of one micro-batch of one data shard."""
    batches: int = 4
    """Micro-batches of a shard."""
    steps: int = 1
    """Micro-batches in a group."""
    named: bool = True
    """Whether ``accumulate`` is told the model."""
    clips: tuple[Clip, ...] = ()
    """One for each update; none: no clipping."""
    rates: tuple[float, ...] = ()
    """Learning rates set on the prepared optimizer, one for each update; none: the optimizer's own."""


@attrs.frozen
class Trained:
    """What one rank saw of a training."""

    weights: dict[str, Tensor]
    """Full, by the names of the user's module; complete on rank 0."""
    groups: list[list[list[int]]]
    """Numbers of the samples, by update and micro-batch."""
    losses: list[float]
    norms: list[float]
    applied: list[bool]
    digest: str
    """Of the weights this rank holds."""


def train(recipe: Recipe) -> Trained:
    """The user's loop."""
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=recipe.steps)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    samples = Samples(recipe.rows * recipe.batches * accelerator.run.world.data_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=recipe.rows))
    groups: list[list[list[int]]] = [[]]
    losses: list[float] = []
    norms: list[float] = []
    applied: list[bool] = []
    for index, x, y in loader:
        with accelerator.accumulate(model) if recipe.named else accelerator.accumulate():
            update = len(applied)
            groups[-1].append(index.tolist())
            loss = mse_loss(model(x), y)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients and recipe.clips:
                norms += clip(accelerator, model, recipe.clips[update])
            if accelerator.sync_gradients and recipe.rates:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.rates[update]
            optimizer.step()
            if accelerator.sync_gradients:
                applied.append(not optimizer.step_was_skipped)
                groups.append([])
            optimizer.zero_grad()
    return Trained(full_weights(accelerator, model), groups[:-1], losses, norms, applied, digest(accelerator, model))


def clip(accelerator: Any, model: nn.Module, how: Clip) -> list[float]:
    """Clip as a user would; the norm before, if it is clipping by norm."""
    named = accelerator.unwrap_model(model).named_parameters()
    parameters = [parameter for name, parameter in named if name.startswith(how.part)] if how.part else None
    if how.by_value:
        accelerator.clip_grad_value_(parameters or model.parameters(), how.max_norm)
        return []
    norm = accelerator.clip_grad_norm_(parameters or model.parameters(), how.max_norm, how.norm_type)
    if type(norm) is not Tensor or norm.ndim != 0:
        raise Violation(f"clip_grad_norm must return a plain 0-d tensor, not {type(norm).__name__}: {norm!r}")
    return [norm.item()]


def full_weights(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full weights on the CPU; complete on rank 0."""
    state = accelerator.get_state_dict(model)
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in state.items()}


def digest(accelerator: Any, model: nn.Module) -> str:
    """A fingerprint of the parameters that this rank holds."""
    found = hashlib.sha256()
    for parameter in accelerator.unwrap_model(model).parameters():
        local = getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
        found.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ------------------------------------------------------------------------------------------------------------ by hand


@attrs.frozen
class ByHand:
    """What plain torch makes of the same data."""

    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    losses: list[list[float]]
    """By rank."""
    norms: list[float]


def by_hand(recipe: Recipe, ranks: Sequence[Trained]) -> ByHand:
    """Train in this process: each update on the mean of the losses of all micro-batches of all ranks behind it.

    Updates that the run left out, since a gradient overflowed, are left out here too.
    """
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    samples = Samples(1 + max(index for trained in ranks for group in trained.groups for b in group for index in b))
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    losses: list[list[float]] = [[] for _ in ranks]
    norms: list[float] = []
    for update, applied in enumerate(ranks[0].applied):
        optimizer.zero_grad()
        for trained, seen in zip(ranks, losses, strict=True):
            group = trained.groups[update]
            for index in group:
                loss = mse_loss(model(samples.x[index]), samples.y[index])
                seen.append(loss.item())
                (loss / len(group) / len(ranks)).backward()
        if recipe.clips:
            norms += _clip_by_hand(model, recipe.clips[update])
        if recipe.rates:
            for rate_group in optimizer.param_groups:
                rate_group["lr"] = recipe.rates[update]
        if applied:
            optimizer.step()
    return ByHand(start, dict(model.state_dict()), losses, norms)


def _clip_by_hand(model: nn.Module, how: Clip) -> list[float]:
    parameters = [parameter for name, parameter in model.named_parameters() if name.startswith(how.part)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if how.by_value:
        for gradient in gradients:
            gradient.clamp_(-how.max_norm, how.max_norm)
        return []
    flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
    largest = how.norm_type == math.inf
    norm = float(flat.abs().max() if largest else flat.abs().pow(how.norm_type).sum() ** (1 / how.norm_type))
    for gradient in gradients:
        gradient.mul_(min(1.0, how.max_norm / norm))
    return [norm]


# ---------------------------------------------------------------------------------------------------------- comparing


def follow(subject: Subject, recipe: Recipe) -> list[Trained]:
    """Train on all ranks, and see to it that losses, norms and weights are those of plain torch; returns the ranks'.

    Raises:
        Violation: They are not.
    """
    ranks: list[Trained] = subject.run(train, recipe)
    check_updates(ranks)
    expected = by_hand(recipe, ranks)
    for rank, found in enumerate(ranks):
        close(found.norms, expected.norms, subject.tolerance, f"norms of the gradients on rank {rank}")
    for rank, (trained, right) in enumerate(zip(ranks, expected.losses, strict=True)):
        close(trained.losses, right, subject.tolerance, f"losses of rank {rank}")
    compare(subject, ranks[0].weights, expected.weights, expected.start)
    if not subject.facts.capabilities.shards_params and len({trained.digest for trained in ranks}) != 1:
        raise Violation("ranks end with different weights, though capabilities.shards_params is False")
    return ranks


def check_updates(ranks: Sequence[Trained]) -> None:
    """Ranks must agree on which updates there were, and most must have been made."""
    applied = ranks[0].applied
    if any(trained.applied != applied for trained in ranks):
        raise Violation(f"ranks disagree on which updates were made: {[trained.applied for trained in ranks]}")
    if not applied or sum(applied) * 2 < len(applied):
        raise Violation(f"only {sum(applied)} of {len(applied)} updates were made")


def compare(
    subject: Subject, found: Mapping[str, Tensor], right: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> None:
    """See to it that training changed weights as it should.

    Raises:
        Violation: Names differ, or weights do by more than the tolerance, as a part of what training changed.
    """
    if sorted(found) != sorted(right):
        raise Violation(f"the full state has the names {sorted(found)}; the user's module has {sorted(right)}")
    wrong = deviation(found, right, start)
    if not wrong <= subject.tolerance:
        raise Violation(
            f"weights deviate from plain torch by {wrong:.1e} of what training changed; {subject.tolerance:.1e} "
            f"would be right (most of it in {_worst(found, right)})"
        )


def deviation(found: Mapping[str, Tensor], right: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """The distance of two sets of weights, as a part of the way from the start."""
    way = _distance(right, start)
    return _distance(found, right) / max(way, 1e-12)


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[name].float() - other[name].float()).pow(2).sum()) for name in other))


def _worst(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str:
    return max(right, key=lambda name: float((found[name].float() - right[name].float()).norm()))


def close(found: Sequence[float], right: Sequence[float], tolerance: float, what: str) -> None:
    """See to it that numbers are equal, but for rounding.

    Raises:
        Violation: They are not.
    """
    fine = len(found) == len(right)
    fine = fine and all(abs(a - b) <= tolerance * max(abs(b), 1e-3) for a, b in zip(found, right, strict=True))
    if not fine:
        raise Violation(f"{what} should be {_numbers(right)}, but are {_numbers(found)}")


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"
