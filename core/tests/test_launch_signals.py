"""A signal that comes while a process is being started."""

from __future__ import annotations

import os
import signal

import pytest

from drivetrain.launch.signals import SignalGate, Stopped


def start_while(*signals: signal.Signals, gate: SignalGate, done: list[str]) -> None:
    """Start something under ``gate.held()`` while ``signals`` come, and go on."""
    with gate.held():
        for number in signals:
            os.kill(os.getpid(), number)
        done.append("started")
    done.append("went on")


def test_it_counts_once_what_was_started_is_known() -> None:
    done: list[str] = []
    with SignalGate() as gate, pytest.raises(Stopped, match="SIGTERM"):
        start_while(signal.SIGTERM, gate=gate, done=done)
    assert done == ["started"]
    assert not gate.hasty


def test_a_second_one_is_haste() -> None:
    done: list[str] = []
    with SignalGate() as gate, pytest.raises(Stopped, match="SIGTERM"):
        start_while(signal.SIGTERM, signal.SIGINT, gate=gate, done=done)
    assert done == ["started"]
    assert gate.hasty


def test_elsewhere_it_counts_at_once() -> None:
    done: list[str] = []
    with SignalGate() as gate:
        start_while(gate=gate, done=done)
        with pytest.raises(Stopped, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert done == ["started", "went on"]
