"""Processes of one start: noticing that one failed, and stopping all of them, with whatever they started themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.launch.environment import RESOLVED
from drivetrain.launch.faults import Death, Fault, first_fault, reports
from drivetrain.launch.signals import SignalGate

if TYPE_CHECKING:
    import psutil

__all__ = ["Processes", "stop_tree"]

FAILURE_GRACE = 5.0
"""Seconds that ranks get to end by themselves when another one failed, or once they were interrupted."""
TERMINATION_GRACE = 30.0
"""Seconds that ranks get after a SIGTERM from outside, where scripts save their work before a machine is taken away."""
LINGER_LIMIT = 10.0
"""Seconds after which a rank that reported an uncaught exception, but doesn't end, is killed."""
ORPHAN_GRACE = 1.0
"""Seconds that processes get whose rank is gone, unless the launcher itself got a SIGTERM."""

_LOOK = 0.05


@attrs.define(eq=False)
class Processes:
    """The ranks of one attempt that run on this machine."""

    folder: Path
    """The run's own folder, where ranks leave reports."""
    mark: str
    """Value of ``DRIVETRAIN_RESOLVED``, which tells this run's processes from all others."""
    gate: SignalGate
    attempt: int = 0
    ranks: Mapping[int, subprocess.Popen[Any]] = attrs.field(factory=dict)
    first: Fault | None = None
    stopped: tuple[int, ...] = ()
    """Ranks that still ran when the launcher stopped them."""
    ended: tuple[int, ...] = ()
    """Ranks that had ended well by the time the first one failed."""
    _looked: float = attrs.field(init=False, factory=time.time)
    """When the ranks were looked at last; on a busy machine that is longer ago than the monitor's interval."""

    def begin(self, attempt: int, ranks: Mapping[int, subprocess.Popen[Any]]) -> None:
        """Watch the processes of a new attempt, by rank."""
        self.attempt, self.ranks, self.first = attempt, ranks, None
        self.stopped = self.ended = ()
        self._looked = time.time()

    def check(self) -> None:
        """Look at all ranks. If one has failed, keep how the first one did, and stop the others."""
        if self.first is not None:
            return
        self._end_lingering()
        earliest, self._looked = self._looked, time.time()
        dead = [
            Death(rank=rank, pid=process.pid, code=code, time=earliest)
            for rank, process in self.ranks.items()
            if (code := process.poll())
        ]
        if dead:
            self.ended = tuple(rank for rank, process in self.ranks.items() if process.poll() == 0)
            self.first = first_fault(self.folder, self.attempt, [*dead, *self._dying(dead)])
            self.stop(None)

    def _dying(self, dead: Sequence[Death]) -> Iterator[Death]:
        """Ranks that reported how they failed and have not ended yet: they may have been first, and end more slowly."""
        gone = {death.rank for death in dead}
        for rank, report in reports(self.folder, self.attempt).items():
            process = self.ranks.get(rank)
            if process is not None and rank not in gone and report["pid"] == process.pid:
                yield Death(rank=rank, pid=process.pid, code=report["exit_code"], time=report["time"])

    def _end_lingering(self) -> None:
        """Kill ranks that reported how they failed but hang while they end, in a thread that never stops, say."""
        for rank, report in reports(self.folder, self.attempt).items():
            process = self.ranks.get(rank)
            late = time.time() - report["time"] > LINGER_LIMIT
            if process is not None and late and report["pid"] == process.pid and process.poll() is None:
                process.kill()
                process.wait()

    def stop(self, signum: int | None) -> None:
        """Stop every process of this run on this machine, and return when none is left. May be called again.

        Args:
            signum: The signal the launcher got, passed on to the ranks; None if one of them failed.
        """
        alive = tuple(rank for rank, process in self.ranks.items() if process.poll() is None)
        self.stopped = self.stopped or alive
        stop_tree(list(self.ranks.values()), self.mark, signum, self.gate)


def stop_tree(ranks: Sequence[subprocess.Popen[Any]], mark: str, signum: int | None, gate: SignalGate) -> None:
    """Stop processes and all that they started, gently first: their signal, then SIGTERM, then SIGKILL.

    Args:
        ranks: The processes.
        mark: Value of ``DRIVETRAIN_RESOLVED``, by which children are known whose parent is gone.
        signum: What the ranks get first; None: SIGTERM, since one of them failed.
        gate: Cuts the waiting short once the user asks again.
    """
    grace = TERMINATION_GRACE if signum == signal.SIGTERM else FAILURE_GRACE
    # Taken before the first signal: once a rank is gone, nothing leads from it to its children.
    family = _descendants(ranks)
    for step in dict.fromkeys((signum or signal.SIGTERM, signal.SIGTERM)):
        for rank in ranks:
            if rank.poll() is None and not (step == signal.SIGINT and _terminal_has_told(rank.pid)):
                rank.send_signal(step) if sys.platform != "win32" else rank.terminate()
        if _ended(ranks, grace, gate):
            break
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    _end_orphans({*family, *_marked(mark)}, grace if signum == signal.SIGTERM else ORPHAN_GRACE, gate)
    _ended(ranks, FAILURE_GRACE, SignalGate())


def _terminal_has_told(pid: int) -> bool:
    """Whether Ctrl-C reached a child without us: a terminal sends it to the whole group in its foreground."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp() == os.getpgid(pid)
    except (AttributeError, OSError, ValueError):  # no terminal, no stdin, or no such thing on this system
        return False


def _ended(ranks: Sequence[subprocess.Popen[Any]], seconds: float, gate: SignalGate) -> bool:
    """Wait until all ranks have ended; False if some have not in time, or the user has lost patience."""
    end = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks):
        if gate.hasty or time.monotonic() >= end:
            return False
        time.sleep(_LOOK)
    return True


def _descendants(ranks: Iterable[subprocess.Popen[Any]]) -> list[psutil.Process]:
    import psutil

    found: list[psutil.Process] = []
    for rank in ranks:
        try:
            found += psutil.Process(rank.pid).children(recursive=True)
        except psutil.Error:
            continue  # already gone
    return found


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Every process with this run's mark in its environment, whoever its parent is now."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RESOLVED) == mark:
                yield process
        except (psutil.Error, OSError):
            continue  # not ours to look at, or already gone


def _end_orphans(processes: Iterable[psutil.Process], seconds: float, gate: SignalGate) -> None:
    left = [process for process in processes if _runs(process)]
    for process in left:
        _signal(process, kill=False)
    end = time.monotonic() + seconds
    while left and not gate.hasty and time.monotonic() < end:
        time.sleep(_LOOK)
        left = [process for process in left if _runs(process)]
    for process in left:
        _signal(process, kill=True)


def _runs(process: psutil.Process) -> bool:
    """Whether a process still does anything. A zombie does not; it waits for its parent."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(process: psutil.Process, *, kill: bool) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):  # gone meanwhile
        if kill:
            process.kill()
        else:
            process.terminate()
