"""Compiled operations: what is there, locks that killed builds leave, and what the doctor says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.requirements import installed_version
from drivetrain_deepspeed import DeepSpeed, checks, ops

needs_engine = pytest.mark.skipif(installed_version("deepspeed") is None, reason="the engine is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def lock(folder: Path, age: float) -> Path:
    path = folder / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    then = time.time() - age
    for each in (path, path.parent):
        os.utime(each, (then, then))
    return path


def test_a_lock_is_stale_once_nothing_changes_beside_it(folder: Path) -> None:
    path = lock(folder, 3600)
    assert ops.stale_locks() == [path]
    (path.parent / "cpu_adam.o").touch()  # a build goes on
    assert ops.stale_locks() == []


@needs_engine
def test_the_doctor_names_a_stale_lock_and_how_to_be_rid_of_it(folder: Path) -> None:
    path = lock(folder, 3600)
    row = next(row for row in checks.engine(DeepSpeed.requires) if row.name.startswith("locks"))
    assert row.ok is False
    assert row.fix == f"remove: {path}"


@needs_engine
def test_the_doctor_says_what_is_compiled(folder: Path) -> None:
    rows = {row.name: row for row in checks.engine(DeepSpeed.requires)}
    assert rows["operations compiled for the CPU"].ok is None
    assert rows["operations compiled for the CPU"].fix == "python -m drivetrain_deepspeed.ops"
    (folder / "cpu_adam").mkdir()
    (folder / "cpu_adam" / "cpu_adam.so").touch()
    rows = {row.name: row for row in checks.engine(DeepSpeed.requires)}
    assert rows["operations compiled for the CPU"].ok is True
    assert rows["deepspeed"].ok is True


def test_the_doctor_names_an_engine_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed_version", lambda name: None)
    (row,) = checks.engine(DeepSpeed.requires)
    assert (row.ok, row.detail) == (False, "not installed")
    assert 'pip install "drivetrain[deepspeed]"' in row.fix


@pytest.mark.slow
def test_a_build_that_is_killed_does_not_block_the_next(folder: Path) -> None:
    holding = (
        "import sys, time, pathlib; from torch.utils.file_baton import FileBaton; p = pathlib.Path(sys.argv[1]); "
        "p.parent.mkdir(parents=True); FileBaton(str(p)).try_acquire(); print('held', flush=True); time.sleep(60)"
    )
    path = folder / "cpu_adam" / "lock"
    process = subprocess.Popen([sys.executable, "-c", holding, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert path.exists()  # torch waits for it for ever
    then = time.time() - 3600
    for each in (path, path.parent):
        os.utime(each, (then, then))
    (path.parent / "cpu_adam.so").touch()  # so that nothing is compiled here
    os.utime(path.parent, (then, then))
    os.utime(path.parent / "cpu_adam.so", (then, then))
    assert ops.main() == 0
    assert not path.exists()
