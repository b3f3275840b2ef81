"""Fixtures for tests that start real processes, and for those of a third-party device."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain import registry
from drivetrain.testing.pool import WorkerPool

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


# ------------------------------------------------------------------------------------- a device of a third party: acme

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "backends" / "template"


@pytest.fixture(scope="session")
def acme_wheel() -> Path:
    """The wheel of the plugin template. Its library is compiled once a checkout and torch, which takes minutes."""
    import torch

    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, by the name c++")
    room = ROOT / "build" / "vendor"
    room.mkdir(parents=True, exist_ok=True)
    with _alone(room / "lock"):
        source = room / "source"  # a copy: its objects stay, so only what has changed is compiled again
        stamp, built_for = room / "built_for", f"torch {torch.__version__}, {sys.implementation.cache_tag}"
        if not stamp.exists() or stamp.read_text() != built_for:
            shutil.rmtree(source, ignore_errors=True)
            stamp.write_text(built_for)
        for stale in (source / "src", *(source / "build").glob("lib*"), room / "dist"):
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(TEMPLATE, source, dirs_exist_ok=True)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
        done = subprocess.run(
            [*command, "--wheel-dir", str(room / "dist"), str(source)],
            env={**os.environ, "MAX_JOBS": "2"},
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (wheel,) = (room / "dist").glob("*.whl")
        return wheel


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time. The lock goes with its process, so none is left by one that was killed."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def acme_site(acme_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the plugin template is installed from its wheel."""
    site = tmp_path_factory.mktemp("acme")
    zipfile.ZipFile(acme_wheel).extractall(site)
    return site


@pytest.fixture(scope="module")
def acme(acme_site: Path) -> Iterator[Path]:
    """The plugin template is installed, as far as this process and those it starts can tell."""
    sys.path.insert(0, str(acme_site))
    registry.refresh()
    yield acme_site
    sys.path.remove(str(acme_site))
    registry.refresh()


class Chips:
    """Two processes, and two simulated chips for them."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool

    def one(self, task: Callable[..., Any], *args: Any, **config: Any) -> Any:
        """Run a task in a run of one process; what it returned."""
        return self.pool.run(task, *args, size=1, config=self._config(config), timeout=90)[0]

    def two(self, task: Callable[..., Any], *args: Any, **config: Any) -> list[Any]:
        """Run a task on both ranks of a run, under ddp if nothing else is said; what they returned."""
        return self.pool.run(task, *args, config={"backend": "ddp", **self._config(config)}, timeout=120)

    def _config(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"device": "acme", "collective_timeout": 30, **settings}


@pytest.fixture(scope="module")
def chips(acme: Path) -> Iterator[Chips]:
    """The made-up vendor's chips, with a process for each."""
    with WorkerPool(2, {"ACME_SIMULATED_CHIPS": "2"}) as pool:
        yield Chips(pool)
