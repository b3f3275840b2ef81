"""Environment variables as settings of a program."""

from __future__ import annotations

import os

import pytest

from drivetrain.environment import clear_environment, parse_flag_from_env, patch_environment, str_to_bool


def test_a_patch_holds_in_its_context_and_is_taken_back_after_an_error(monkeypatch):
    monkeypatch.setenv("THERE", "old")
    monkeypatch.delenv("NEW", raising=False)
    seen = {}

    def fail():
        with patch_environment(there=1, new="x"):
            seen.update(os.environ)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (seen["THERE"], seen["NEW"]) == ("1", "x")
    assert os.environ["THERE"] == "old"
    assert "NEW" not in os.environ


def test_a_cleared_environment_comes_back_whole(monkeypatch):
    monkeypatch.setenv("THERE", "old")
    before = dict(os.environ)
    with clear_environment():
        assert not os.environ
        os.environ["INSIDE"] = "1"
    assert dict(os.environ) == before


@pytest.mark.parametrize(("text", "value"), [("Yes", 1), ("ON", 1), ("1", 1), ("false", 0), ("n", 0)])
def test_words_for_yes_and_no(text, value):
    assert str_to_bool(text) == value


def test_a_word_for_neither_is_an_error_that_lists_the_words():
    with pytest.raises(ValueError, match=r"'maybe' means neither.*yes"):
        str_to_bool("maybe")


def test_a_flag_has_a_default_where_it_is_not_set(monkeypatch):
    monkeypatch.delenv("FLAG", raising=False)
    assert parse_flag_from_env("FLAG", default=True) is True
    monkeypatch.setenv("FLAG", "no")
    assert parse_flag_from_env("FLAG", default=True) is False
