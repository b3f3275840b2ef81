"""InitProcessGroupKwargs: from a script's names to core's keys."""

from __future__ import annotations

from datetime import timedelta

import pytest

from drivetrain_backends import InitProcessGroupKwargs


def test_given_fields_become_keys_of_core() -> None:
    handler = InitProcessGroupKwargs("gloo", "tcp://127.0.0.1:1", timedelta(minutes=2))
    assert handler.settings() == {
        "collectives": "gloo",
        "init_method": "tcp://127.0.0.1:1",
        "collective_timeout": 120.0,
    }


def test_what_is_not_given_is_left_to_the_configuration() -> None:
    assert InitProcessGroupKwargs().settings() == {}


def test_a_timeout_in_seconds_is_refused() -> None:
    with pytest.raises(TypeError, match="timeout"):
        InitProcessGroupKwargs(timeout=30)  # type: ignore[arg-type]


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout must be above zero"):
        InitProcessGroupKwargs(timeout=timedelta(0))
