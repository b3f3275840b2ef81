"""What a backend says it can't clip is refused before it is asked to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from drivetrain.clipping import check_clipping
from drivetrain.errors import DrivetrainError
from drivetrain.plugin import Capabilities


def run_with(**capabilities: Any) -> Any:
    """As much of a run as is asked; its backend puts models into a list of one."""
    hooks = SimpleNamespace(unwrap=lambda run, model: model[0])
    return SimpleNamespace(capabilities=Capabilities(**capabilities), names={"backend": "mine"}, hooks=hooks)


def wrapped(model: nn.Module) -> nn.Module:
    return nn.ModuleList([model])


def test_norms_that_are_not_offered_are_refused_with_those_that_are() -> None:
    run = run_with(clip_norms=frozenset({2.0, float("inf")}))
    check_clipping(run, [], [], 2.0)
    with pytest.raises(DrivetrainError, match=r"backend 'mine' can't clip by the 1\.0-norm; it offers: 2\.0, inf"):
        check_clipping(run, [], [], 1.0)


def test_a_part_of_a_model_is_refused_where_only_whole_ones_are_clipped() -> None:
    run = run_with(clip_subsets=False)
    one, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    models = [wrapped(one), wrapped(other)]
    check_clipping(run, models, list(one.parameters()), 2.0)
    check_clipping(run, models, [*one.parameters(), *other.parameters()], 2.0)
    with pytest.raises(DrivetrainError, match=r"was given 2 of the 4 trainable parameters of a Sequential"):
        check_clipping(run, models, [*one.parameters(), *other[0].parameters()], 2.0)
    check_clipping(run_with(), models, list(other[0].parameters()), 2.0)


def test_frozen_parameters_are_no_part_that_is_missing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[0].requires_grad_(True)
    check_clipping(run_with(clip_subsets=False), [wrapped(model)], list(model[0].parameters()), 2.0)
    check_clipping(run_with(clip_subsets=False), [wrapped(model)], list(model.parameters()), 2.0)
