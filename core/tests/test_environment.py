"""Environment variables as settings of a program."""

from __future__ import annotations

import os

import pytest

from drivetrain.environment import (
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)


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


def test_the_first_whole_number_that_is_set_counts(monkeypatch):
    monkeypatch.setenv("FIRST", "-1")
    monkeypatch.setenv("SECOND", "3")
    monkeypatch.delenv("THIRD", raising=False)
    assert get_int_from_env(["THIRD", "FIRST", "SECOND"], 7) == 3
    assert get_int_from_env(["THIRD"], 7) == 7
    monkeypatch.setenv("FIRST", "many")
    with pytest.raises(ValueError, match="FIRST should be a whole number, and is 'many'"):
        get_int_from_env(["FIRST"], 7)


def test_a_choice_is_the_text_that_is_set(monkeypatch):
    monkeypatch.setenv("CHOICE", "bf16")
    monkeypatch.delenv("OTHER", raising=False)
    assert (parse_choice_from_env("CHOICE"), parse_choice_from_env("OTHER")) == ("bf16", "no")


def test_variables_become_lines_and_nothing_can_smuggle_in_another():
    assert convert_dict_to_env_variables({"A": 1, "B": "x y"}) == ["A=1\n", "B=x y\n"]
    for bad in ({"A": "1\nB=2"}, {"": "1"}, {"A=B": "1"}):
        with pytest.raises(ValueError, match="can't be written as a line"):
            convert_dict_to_env_variables(bad)
