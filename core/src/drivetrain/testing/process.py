"""The parent's end of one worker process: starting it, talking to it, ending it with all its children."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from drivetrain.testing.fork_server import Forked, ForkServer
from drivetrain.testing.messages import receive, send

__all__ = ["WorkerProcess", "worker_environment"]

# A worker must not take this process for its launcher, nor read its settings.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NOT_INHERITED_PREFIXES = ("DRIVETRAIN_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_", "MV2_", "PYTEST_CURRENT_")

_OUTPUT_TAIL = 20_000


class WorkerProcess:
    """A Python process running :mod:`drivetrain.testing.worker`.

    Args:
        log: File for what it prints.
        environment: All of its environment variables.
        server: What forks it, if it can; None: a new process.
    """

    def __init__(self, log: Path, environment: Mapping[str, str], server: ForkServer | None = None) -> None:
        self._log = log
        self._answers: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._process: Forked | subprocess.Popen[bytes]
        self._ready = False
        with log.open("wb") as output:
            forked = None if server is None else server.fork(output)
            self._process = forked or _new_process(environment, output)
        threading.Thread(target=self._read, name=f"answers of {self._process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                message = receive(self._process.stdout)
            except (EOFError, OSError):
                self._answers.put(("ended", self._process.wait()))
                return
            try:
                kind, content = pickle.loads(message)
            except Exception as error:
                # The answer came whole, but its classes can't be had here.
                kind = "error"
                content = {"type": type(error).__qualname__, "message": f"unreadable here: {error}", "traceback": ""}
            self._answers.put((kind, content))

    def wait_until_ready(self, deadline: float) -> None:
        """Return once it takes tasks.

        Raises:
            RuntimeError: It ended, or was not ready at ``deadline`` (of ``time.monotonic``).
        """
        if self._ready:
            return
        answer = self.poll(max(0.0, deadline - time.monotonic()))
        if answer is None or answer[0] != "ready":
            self.kill()
            what = "was not ready in time" if answer is None else f"ended with exit code {answer[1]}"
            raise RuntimeError(f"a worker process {what}; its output:\n{self.output()}")
        self._ready = True

    def send(self, task: Mapping[str, Any]) -> None:
        """Hand it a task. If it is gone already, :meth:`poll` says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            send(self._process.stdin, pickle.dumps(dict(task)))

    def poll(self, seconds: float) -> tuple[str, Any] | None:
        """Its next answer, None if there is none yet.

        An answer is ``("ready", None)``, ``("result", value)``, ``("error", details)`` or ``("ended", exit code)``.
        """
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def output(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-_OUTPUT_TAIL:] if self._log.exists() else ""

    def kill(self) -> None:
        """End it and its children at once, and wait until it is gone."""
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif isinstance(self._process, subprocess.Popen):
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def _new_process(environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "drivetrain.testing.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        env=dict(environment),
        start_new_session=os.name == "posix",  # so that it can be ended with its children
    )


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child that imports the same modules, without what a launcher has set here.

    Args:
        extra: More variables.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES)
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}
