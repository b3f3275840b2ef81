"""Group *launch*: ``drivetrain launch`` starts the plugins' processes, and ends all of them when one fails."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import attrs
import psutil

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.launched import EXIT_CODE, MESSAGE
from drivetrain.testing.conformance.subject import Subject
from drivetrain.testing.process import worker_environment

__all__ = ["LAUNCHED", "Ended", "checks", "launch"]

checks = CheckList("launch")

LAUNCHED = "a launch that came to a good end"
"""Key of ``Subject.shared``: the state's check of fresh processes has launched some already."""

_FAILING = "launches of which the last rank fails"

_HARD_LIMIT = 120
"""Seconds after which a launcher that hangs is killed, whatever it waits for."""
_MARK = "DRIVETRAIN_CONFORM_MARK"
_GRACE = 3.0
"""Seconds that processes get to be gone after the launcher."""


@attrs.frozen
class Ended:
    """How a launch came to its end."""

    code: int | None
    """Exit code; None: it had to be killed."""
    output: str
    left: list[str]
    """Processes it left behind."""

    @property
    def tail(self) -> str:
        """The end of the output."""
        return self.output[-3000:]


def launch(subject: Subject, *arguments: str) -> Ended:
    """Run ``drivetrain launch`` on the script of this group, to its end."""
    config = subject.folder / "launch.yaml"
    config.write_text(json.dumps(subject.suite.config()))
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "drivetrain", "launch", "--config_file", str(config)]
    command += ["--num_processes", str(subject.size), "-m", "drivetrain.testing.conformance.launched", *arguments]
    process = subprocess.Popen(
        command,
        cwd=subject.folder,
        env={**worker_environment({}), "DRIVETRAIN_HOME": str(subject.folder), _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_HARD_LIMIT)
        return Ended(process.returncode, output, _left(mark))
    except subprocess.TimeoutExpired as late:
        return Ended(None, (late.stdout or b"").decode("utf-8", "replace"), [])  # bytes, whatever `text` says
    finally:
        _end(process, mark)


def _marked(mark: str) -> list[psutil.Process]:
    """Living processes that the launcher started, or they: all inherit a variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _left(mark: str) -> list[str]:
    deadline = time.monotonic() + _GRACE
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            left.append(f"{process.pid} ({' '.join(process.cmdline()[:4])})")
    return left


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """Let nothing run on, whatever happened."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for other in _marked(mark):
        with contextlib.suppress(psutil.Error):
            other.kill()


def _check(ended: Ended) -> None:
    if ended.code is None:
        raise Violation(f"drivetrain launch had not ended after {_HARD_LIMIT} s; its output:\n{ended.tail}")
    expect(ended.left, [], "processes left behind by drivetrain launch")


def failing(subject: Subject) -> dict[str, Ended]:
    """How launches end of which the last rank fails, by mode. Both at once: a launcher keeps one core busy at first."""
    if _FAILING not in subject.shared:
        modes = ("raise", "exit")
        with ThreadPoolExecutor(len(modes)) as threads:
            ended = threads.map(functools.partial(launch, subject), modes)
            subject.shared[_FAILING] = dict(zip(modes, ended, strict=True))
    found: dict[str, Ended] = subject.shared[_FAILING]
    return found


@checks("a launched training ends with exit code 0, and leaves no process", where="largest world")
def trains(subject: Subject) -> None:
    ended = subject.shared.get(LAUNCHED) or launch(subject, "train")
    _check(ended)
    wanted = f"done with {subject.size} process(es)"
    if ended.code != 0 or wanted not in ended.output:
        raise Violation(f"expected exit code 0 and {wanted!r}, got {ended.code} and:\n{ended.tail}")


@checks(
    "a rank that raises ends all ranks: the exit code tells, its error is shown, no process is left",
    where="largest world",
)
def raises(subject: Subject) -> None:
    ended = failing(subject)["raise"]
    _check(ended)
    for wanted in (MESSAGE, f"rank {subject.size - 1}") if subject.size > 1 else (MESSAGE,):
        if wanted not in ended.output:
            raise Violation(f"the output does not show {wanted!r}:\n{ended.tail}")
    if ended.code == 0:
        raise Violation("the last rank raised, but the exit code is 0")


@checks("the exit code of a rank is passed on", where="largest world")
def exits(subject: Subject) -> None:
    ended = failing(subject)["exit"]
    _check(ended)
    expect(ended.code, EXIT_CODE, f"exit code of drivetrain launch, of which a rank ended with {EXIT_CODE}")
