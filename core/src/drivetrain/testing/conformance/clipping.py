"""Group *numerics*, third part: gradients clipped by their global norm, and by value."""

from __future__ import annotations

import math
from collections.abc import Callable

from drivetrain.testing.conformance.checks import CheckList
from drivetrain.testing.conformance.recipes import Clip, Recipe, follow, train
from drivetrain.testing.conformance.subject import Subject

__all__ = ["checks"]

checks = CheckList("numerics")


def _clips(norm_type: float, part: str = "") -> tuple[Clip, ...]:
    """A tight bound, another one, one that is never reached, and a tight one again: the bound of each call counts."""
    return tuple(Clip(bound, norm_type, part) for bound in (0.05, 0.02, 1e6, 0.03))


def _offers(norm_type: float) -> Callable[[Subject], str | None]:
    def reason(subject: Subject) -> str | None:
        norms = subject.facts.capabilities.clip_norms
        return None if norms is None or norm_type in norms else f"the backend does not claim the {norm_type:g}-norm"

    return reason


def _whole(name: str, norm_type: float) -> None:
    @checks(name, unclaimed=_offers(norm_type))
    def clipped(subject: Subject) -> None:
        follow(subject, Recipe(clips=_clips(norm_type)))


_whole("gradients are clipped by the global 2-norm given at each call, which is returned", 2.0)
_whole("gradients are clipped by the global 1-norm", 1.0)
_whole("gradients are clipped by the global maximum norm", math.inf)


@checks("the norm that clips is that of the accumulated, finished gradient", unclaimed=_offers(2.0))
def clip_accumulated(subject: Subject) -> None:
    follow(subject, Recipe(batches=7, steps=2, clips=_clips(2.0)))


@checks(
    "norms that are not claimed are refused",
    unclaimed=lambda subject: (
        "the backend claims every norm" if subject.facts.capabilities.clip_norms is None else None
    ),
)
def refuse_norms(subject: Subject) -> None:
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        if _offers(norm_type)(subject):
            subject.refuse(train, Recipe(clips=_clips(norm_type)), what=f"clipping by the {norm_type:g}-norm")


@checks(
    "a part of a model is clipped alone where that is claimed, and refused where it is not",
    unclaimed=lambda subject: (
        "the backend claims no norm" if subject.facts.capabilities.clip_norms == frozenset() else None
    ),
)
def clip_part(subject: Subject) -> None:
    offered = sorted(subject.facts.capabilities.clip_norms or {2.0})
    recipe = Recipe(clips=_clips(offered[0], part="2."))
    if subject.facts.capabilities.clip_subsets:
        follow(subject, recipe)
    else:
        subject.refuse(train, recipe, what="clipping a part of a model, which is not claimed (clip_subsets=False),")


@checks("gradients are clipped by value")
def clip_by_value(subject: Subject) -> None:
    follow(subject, Recipe(clips=tuple(Clip(bound, by_value=True) for bound in (1e-3, 1e-4, 1e6, 2e-3))))
