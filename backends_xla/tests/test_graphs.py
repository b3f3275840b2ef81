"""Graphs that don't stop coming are spoken of, with the reason as far as it can be seen."""

from __future__ import annotations

import logging

import pytest
import torch

from drivetrain_xla.graphs import WARM_UP, Graphs


class Counted(Graphs):
    """Without the engine: a new graph for every set of shapes, or for every step."""

    compiled = 0  # type: ignore[assignment]


def run(steps: int, limit: int = 3, *, shapes: int = 1, each_step: bool = False) -> None:
    Counted.compiled = 0
    graphs = Counted(limit)
    seen = set()
    for number in range(steps):
        shape = (2, 8 + number % shapes)
        graphs.saw({"x": torch.zeros(shape), "name": "a"})
        Counted.compiled += each_step or shape not in seen
        seen.add(shape)
        graphs.stepped()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "drivetrain_xla")
    return caplog


def test_a_loop_that_has_shown_all_its_graphs_is_left_in_peace(log: pytest.LogCaptureFixture) -> None:
    run(4 * WARM_UP, shapes=WARM_UP)
    assert not log.records


def test_changing_shapes_are_named_with_the_advice_to_pad_once(log: pytest.LogCaptureFixture) -> None:
    run(4 * WARM_UP, shapes=100)
    (record,) = log.records
    assert "3 graphs were compiled anew" in record.message
    assert "[[2, " in record.message
    assert "Pad" in record.message


def test_new_graphs_for_the_same_shapes_are_told_apart(log: pytest.LogCaptureFixture) -> None:
    run(4 * WARM_UP, each_step=True)
    (record,) = log.records
    assert "shapes do not change" in record.message


def test_the_warning_can_be_turned_off(log: pytest.LogCaptureFixture) -> None:
    run(4 * WARM_UP, limit=0, each_step=True)
    assert not log.records
