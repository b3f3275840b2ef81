"""Which of the ranks that are found dead at one look failed first."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.launch.processes import Processes
from drivetrain.launch.signals import SignalGate


def ended_with(code: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"])
    process.wait(30)
    return process


@pytest.mark.parametrize("looked_between", [False, True])
def test_a_rank_that_said_nothing_was_first_unless_it_was_seen_alive_after_the_other_failed(
    tmp_path: Path, looked_between: bool
) -> None:
    """However long ago the last look was: a busy machine looks seldom."""
    raised, killed = ended_with(1), ended_with(7)
    watched = Processes(folder=tmp_path, mark="", gate=SignalGate())
    watched.begin(0, {})
    report = {"rank": 0, "pid": raised.pid, "time": time.time(), "exit_code": 1, "place": ""}
    report |= {"type": "ConnectionError", "message": "reset by peer", "traceback": "", "host": "here"}
    (tmp_path / "fault-0-0.json").write_text(json.dumps(report))
    time.sleep(0.3)
    if looked_between:
        watched.check()
    watched.ranks = {0: raised, 1: killed}
    watched.check()
    assert watched.first is not None
    assert (watched.first.rank, watched.first.exit_code) == ((0, 1) if looked_between else (1, 7))
