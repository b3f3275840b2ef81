"""Fixtures for tests that start real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HARD_LIMIT = 60
"""Seconds after which a launcher that hangs is killed, whatever it waits for."""


class Launcher:
    """Runs ``drivetrain launch`` in a folder of its own, and knows which processes it leaves behind.

    Every process started here inherits a variable that names the test's folder, by which leftovers are found.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        (folder / "home").mkdir()
        unwanted = ("DRIVETRAIN_", "TORCHELASTIC_", "MASTER_")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
            self.environment.pop(key, None)
        self.environment |= {
            "DRIVETRAIN_HOME": str(folder / "home"),
            "TMPDIR": str(self.temporary),
            "TEST_FOLDER": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script; returns its name."""
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``drivetrain launch`` with these arguments."""
        process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain", "launch", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``drivetrain launch`` to its end."""
        return self.finish(self.start(*arguments))

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait for one that was started."""
        out, err = process.communicate(timeout=HARD_LIMIT)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_for(self, *names: str) -> None:
        """Wait until scripts have written files of these names."""
        self.until(lambda: all((self.folder / name).exists() for name in names), f"files {names}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is true."""
        end = time.monotonic() + HARD_LIMIT
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"waited {HARD_LIMIT} s for {what}")
            time.sleep(0.02)

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this test that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("TEST_FOLDER") == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        """End whatever a failed test left."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        for left in self.leftovers():
            left.kill()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """``drivetrain launch`` in the test's own folder."""
    made = Launcher(tmp_path)
    yield made
    made.close()
