"""Loggers that know their rank, before there is a run and after; several ranks are in the workspace's own tests."""

from __future__ import annotations

import logging

import pytest

from drivetrain import Accelerator, get_logger, state
from drivetrain.logging import MultiProcessAdapter


@pytest.fixture(autouse=True)
def _one_run_a_test(monkeypatch):
    state.reset()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    state.reset()


def test_logging_before_there_is_an_accelerator_decides_nothing(caplog):
    get_logger("program").warning("early")
    assert "early" in caplog.text
    assert state.current() is None
    assert Accelerator(cpu=True).device.type == "cpu"


def test_the_rank_is_the_launchers_while_there_is_no_run(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger = get_logger("program")
    logger.warning("for the main process")
    logger.warning("for %s", "all", main_process_only=False)
    assert caplog.messages == ["[RANK 1] for all"]


def test_a_level_is_the_loggers_own(caplog):
    before = logging.getLogger().level
    logger = get_logger("program.part", log_level="error")
    logger.warning("too low")
    logger.error("high enough")
    assert caplog.messages == ["high enough"]
    assert logging.getLogger().level == before


def test_a_warning_is_given_once_whatever_its_arguments(caplog, monkeypatch):
    monkeypatch.setattr(MultiProcessAdapter, "_warned", set())
    logger = get_logger("program")
    for _ in range(2):
        logger.warning_once("about %s", ["an unhashable list"])
    logger.warning_once("about %s", ["another"])
    assert caplog.messages == ["about ['an unhashable list']", "about ['another']"]


def test_a_line_names_the_place_that_logged_it(caplog, monkeypatch):
    monkeypatch.setattr(MultiProcessAdapter, "_warned", set())
    logger = get_logger("program")
    logger.warning("here")
    logger.log(logging.WARNING, "and here", main_process_only=False)
    logger.warning_once("once")
    assert {record.funcName for record in caplog.records} == {"test_a_line_names_the_place_that_logged_it"}
    assert len(caplog.records) == 3
