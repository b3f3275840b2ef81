"""How ranks failed: what they reported themselves, what their exit codes say, and which of them was first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from drivetrain.errors import LaunchError
from drivetrain.launch.signals import signal_name

__all__ = ["Death", "Fault", "first_fault", "interrupted_at", "load_fault", "reports", "save_fault", "summary"]


@attrs.frozen(kw_only=True)
class Death:
    """A process that ended badly."""

    rank: int
    pid: int
    code: int
    """Exit code, or a signal's number, negative."""
    time: float
    """The earliest moment at which it may have died, in seconds since the epoch."""


@attrs.frozen(kw_only=True)
class Fault:
    """A rank that failed, as far as is known of it."""

    rank: int
    pid: int
    time: float
    exit_code: int
    """What a shell would see: 128 and the number for a signal."""
    signal: str | None = None
    """Name of the signal that killed it."""
    type: str = ""
    """Class of the exception that ended it."""
    message: str = ""
    traceback: str = ""
    """The whole traceback, notes and causes included; for a deadly signal, where the interpreter was."""
    host: str = ""

    @property
    def how(self) -> str:
        """A few words on how it ended."""
        if self.signal is None:
            return f"exit code {self.exit_code}"
        hint = ", as happens when the machine runs out of memory" if self.signal == "SIGKILL" else ""
        return f"killed by {self.signal}{hint}"

    def error(self) -> LaunchError:
        """The exception for callers in Python."""
        return LaunchError(self.rank, self.exit_code, "\n".join(filter(None, [f"{self.how}", self.what()])))

    def what(self) -> str:
        """The traceback, or what was given to ``sys.exit`` if that was a text."""
        if self.traceback:
            return self.traceback.rstrip()
        return "" if self.message in ("", str(self.exit_code)) else f"{self.type}: {self.message}"


def reports(folder: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """What the ranks of an attempt reported of their own failure, by rank."""
    found: dict[int, dict[str, Any]] = {}
    for path in folder.glob(f"fault-{attempt}-*.json"):
        try:
            report = json.loads(path.read_text(encoding="ascii"))
            found[int(report["rank"])] = report
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half-written by a rank that died over it; its exit code is known all the same
    return found


def first_fault(folder: Path, attempt: int, deaths: Iterable[Death]) -> Fault:
    """Which of the ranks found dead at one look failed first, and how.

    A report carries its time. A rank without one was killed, and may have died as early as just after the look before:
    it goes first when in doubt, since a lost peer makes the others raise, while raising kills no peer.

    Args:
        folder: Where reports are.
        attempt: Number of the start they belong to.
        deaths: At least one.
    """
    told = reports(folder, attempt)
    faults = [_fault(death, told.get(death.rank), _stack(folder, attempt, death.rank)) for death in deaths]
    return min(faults, key=lambda fault: fault.time)


def _fault(death: Death, report: dict[str, Any] | None, stack: str) -> Fault:
    name = signal_name(-death.code) if death.code < 0 else None
    code = 128 - death.code if death.code < 0 else death.code
    if report is None or report["pid"] != death.pid:
        return Fault(rank=death.rank, pid=death.pid, time=death.time, exit_code=code, signal=name, traceback=stack)
    # A rank that raised and then had to be killed failed by what it raised.
    raised = report["type"] != "KeyboardInterrupt"
    return Fault(
        rank=death.rank,
        pid=death.pid,
        time=report["time"],
        exit_code=report["exit_code"] if raised else code,
        signal=None if raised else name,
        type=report["type"],
        message=report["message"],
        traceback=report["traceback"],
        host=report["host"],
    )


def _stack(folder: Path, attempt: int, rank: int) -> str:
    """Where the interpreter was when a signal killed it, if it had the time to write that."""
    try:
        return (folder / f"stack-{attempt}-{rank}.txt").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def interrupted_at(folder: Path, attempt: int) -> str:
    """Where the first rank was when Ctrl-C reached it: ``rank 0 was at train.py:31 in main``. Empty if unknown."""
    told = sorted((rank, report) for rank, report in reports(folder, attempt).items() if report["place"])
    for rank, report in told:
        if report["type"] == "KeyboardInterrupt":
            return f"rank {rank} was at {report['place']}"
    return ""


def save_fault(folder: Path, fault: Fault) -> None:
    """Keep the first fault in the run's folder, for :func:`load_fault`."""
    (folder / "first-fault.json").write_text(json.dumps(attrs.asdict(fault)), encoding="ascii")


def load_fault(folder: Path) -> Fault | None:
    """The first fault of a run that ended, None if there was none or it is not known."""
    try:
        return Fault(**json.loads((folder / "first-fault.json").read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):  # none was saved, or not all of it
        return None


def summary(fault: Fault, size: int, stopped: Sequence[int], logs: str | None = None, ended: Sequence[int] = ()) -> str:
    """What the launcher says at the end: what became of the others, who failed first and, in its own words, how.

    The cause comes last, where it is seen without scrolling.

    Args:
        fault: The first one.
        size: Processes over all machines.
        stopped: Ranks of this machine that the launcher had to stop.
        logs: Folder with the output of each rank, if there is one.
        ended: Ranks of this machine that had ended well before. Often they are the cause: one that leaves a loop too
            early takes no part in what the others still do together.
    """
    who = f"rank {fault.rank} of {size} failed first" if size > 1 else "the process failed"
    where = f"pid {fault.pid}" + (f" on {fault.host}" if fault.host else "")
    lines = [f"drivetrain launch: stopped {_listing(stopped)}"] if stopped else []
    if logs:
        lines.append(f"drivetrain launch: the output of each rank is in {logs}")
    lines.append(f"drivetrain launch: {who}: {fault.how} ({where})")
    # Alone, its traceback has just been printed, by itself.
    if size > 1 or (fault.signal and fault.traceback):
        lines += [f"  {line}" for line in fault.what().splitlines()]
    if ended:
        lines.append(
            f"drivetrain launch: {_listing(ended)} had ended before, with exit code 0; if the others waited for "
            f"{'it' if len(ended) == 1 else 'them'}, the cause is there"
        )
    return "\n".join(lines)


def _listing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
