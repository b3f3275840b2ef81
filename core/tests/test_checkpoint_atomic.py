"""A checkpoint is complete or not there: crashes at every step, full disks, what others keep in the directory."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.tests.checkpoints import check, fill, make
from drivetrain.checkpoint import atomic, files
from drivetrain.errors import CheckpointError

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")


def in_child(function: Callable[[], Any]) -> int:
    """Exit code of a forked process that calls the function."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dies_at(step: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that ends the process right before its ``step``-th change of the file system."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            changes = True
        if changes:
            seen += 1
            if seen == step:
                os._exit(9)

    return hook


@posix
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
def test_a_crash_at_any_step_leaves_the_old_checkpoint_or_the_new(tmp_path: Path, replaces: bool) -> None:
    accelerator, model = make()
    target = tmp_path / "checkpoint"
    seen: list[float | None] = []
    for step in range(1, 500):
        fill(model, 1.0)
        if replaces:
            accelerator.save_state(target)
            (target / "notes.txt").write_text("of the user")
            (target / "models" / "0" / "backup").mkdir()
        fill(model, 2.0)

        def save(step: int = step) -> None:
            sys.addaudithook(dies_at(step))
            accelerator.save_state(target)

        code = in_child(save)
        assert code in (0, 9)
        found = atomic.find(target)
        seen.append(check(found) if found.exists() else None)
        assert not replaces or any(tmp_path.rglob("notes.txt"))
        fill(model, 3.0)
        accelerator.save_state(target)  # the next save tidies up
        assert check(target) == 3.0
        if replaces:
            assert (target / "notes.txt").read_text() == "of the user"
            assert (target / "models" / "0" / "backup").is_dir()
        assert not list(tmp_path.glob(".checkpoint.replaced-*"))
        for left in [target, *tmp_path.glob(".checkpoint.partial-*")]:
            atomic.remove(left)
        if code == 0:
            break
    assert code == 0
    assert len(seen) > 20
    old = 1.0 if replaces else None
    assert seen == sorted(seen, key=lambda value: value == 2.0), "once the new one is there it stays"
    assert set(seen) == {old, 2.0}


@posix
@pytest.mark.parametrize("limit", [100, 2000])
def test_a_full_disk_is_an_error_that_names_the_file_and_the_old_checkpoint_stays(tmp_path: Path, limit: int) -> None:
    import resource

    accelerator, model = make()
    model.weight.data = torch.ones(100, 100)
    target = tmp_path / "checkpoint"
    accelerator.save_state(target)
    before = sorted(path.name for path in tmp_path.iterdir())

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"can't write .*partial-.*File too large"):
            accelerator.save_state(target)

    assert in_child(save) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert check(target) == 1.0


@pytest.mark.parametrize("call", range(12))
def test_a_disk_that_fails_at_any_sync_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    accelerator, model = make()
    target = tmp_path / "checkpoint"
    fill(model, 1.0)
    accelerator.save_state(target)
    fill(model, 2.0)
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="Input/output error"):
        accelerator.save_state(target)
    assert check(target) == 1.0
    assert not list(tmp_path.glob(".*"))


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _ = make()
    synced: set[int] = set()
    named: list[bool] = []
    real_rename = Path.rename

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    def rename(path: Path, target: Path) -> Path:
        entries = [path, *path.rglob("*")]
        named.append(all(entry.stat().st_ino in synced for entry in entries))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    accelerator.save_state(tmp_path / "checkpoint")
    assert named == [True]
    assert tmp_path.stat().st_ino in synced


def test_between_the_two_renames_the_new_checkpoint_is_found(tmp_path: Path) -> None:
    accelerator, model = make()
    for name, value in (("a", 1.0), ("b", 2.0)):
        fill(model, value)
        accelerator.save_state(tmp_path / name)
    (tmp_path / "a").rename(tmp_path / ".c.replaced-01234567")
    (tmp_path / "b").rename(tmp_path / ".c.partial-01234567")
    fill(model, 0.0)
    accelerator.load_state(tmp_path / "c")
    assert float(model.weight[0, 0].detach()) == 2.0
    (tmp_path / ".c.partial-01234567" / "manifest.json").unlink()
    accelerator.load_state(tmp_path / "c")
    assert float(model.weight[0, 0].detach()) == 1.0


def test_a_rename_that_fails_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = make()
    target = tmp_path / "checkpoint"
    fill(model, 1.0)
    accelerator.save_state(target)
    real = Path.rename

    def rename(path: Path, place: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        return real(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="putting .*checkpoint in place failed: .*cross-device"):
        accelerator.save_state(target)
    assert check(target) == 1.0
    assert not list(tmp_path.glob(".*"))


# --------------------------------------------------------------------------------------------- other people's files


def test_files_in_the_directory_that_are_not_ours_are_kept(tmp_path: Path) -> None:
    accelerator, _ = make()
    target = tmp_path / "out"
    (target / "logs").mkdir(parents=True)
    (target / "logs" / "events").write_text("1")
    (target / "notes.txt").write_text("2")
    accelerator.save_state(target)
    accelerator.save_state(target)
    assert (target / "logs" / "events").read_text() == "1"
    assert (target / "notes.txt").read_text() == "2"
    accelerator.load_state(target)


def test_nothing_of_the_replaced_checkpoint_stays(tmp_path: Path) -> None:
    accelerator, model = make()
    extra = nn.Linear(1, 1)
    accelerator.prepare(extra)
    accelerator.save_state(tmp_path / "c")
    assert (tmp_path / "c/models/1/model.safetensors").exists()
    accelerator.known.forget()
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c/models").iterdir()) == ["0"]
    assert not (tmp_path / "c/optimizers").exists()


def test_a_directory_that_something_else_uses_our_names_in_is_refused(tmp_path: Path) -> None:
    accelerator, _ = make()
    (tmp_path / "project" / "models").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="project has models already"):
        accelerator.save_state(tmp_path / "project")
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_places_that_can_not_be_replaced_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _ = make()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is no directory"):
        accelerator.save_state(tmp_path / "file")
    with pytest.raises(CheckpointError, match="Not a directory|File exists"):
        accelerator.save_state(tmp_path / "file" / "checkpoint")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(CheckpointError, match="working directory"):
        accelerator.save_state(".")
    (tmp_path / "link").symlink_to(tmp_path / "work")
    with pytest.raises(CheckpointError, match="symbolic link"):
        accelerator.save_state(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "work"]


def test_a_relative_path_and_one_with_a_tilde_mean_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = make()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert accelerator.save_state("a/b") == tmp_path / "a/b"
    assert accelerator.save_state("~/c") == tmp_path / "me/c"
    accelerator.load_state("a/b")


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
def test_of_two_that_save_at_once_one_wins_and_the_other_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    accelerator, model = make()
    target = tmp_path / "c"
    if replaces:
        accelerator.save_state(target)
    fill(model, 1.0)
    accelerator.save_state(tmp_path / "others")
    fill(model, 2.0)
    real = Path.rename

    def rename(path: Path, place: Path) -> Path:
        if ".partial-" in path.name:  # the other one is a moment earlier
            real(tmp_path / "others", target)
        return real(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="another process put a checkpoint in .*c meanwhile, and that one stays"):
        accelerator.save_state(target)
    assert check(target) == 1.0
    monkeypatch.undo()
    accelerator.save_state(target)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model = make()
    fill(model, 1.0)
    accelerator.save_state(tmp_path / "c")

    def replace(models: Any, where: str) -> None:
        fill(model, 2.0)
        accelerator.save_state(tmp_path / "c")

    handle = accelerator.register_load_state_pre_hook(replace)  # after the files of the first one were looked at
    with pytest.raises(CheckpointError, match="c was replaced or deleted by another process while it was being loaded"):
        accelerator.load_state(tmp_path / "c")
    handle.remove()
    accelerator.register_load_state_pre_hook(lambda models, where: shutil.rmtree(where))
    with pytest.raises(CheckpointError, match="c was replaced or deleted by another process while it was being loaded"):
        accelerator.load_state(tmp_path / "c")


def test_what_an_interrupted_save_left_is_reported_and_never_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model = make()
    fill(model, 1.0)
    accelerator.save_state(tmp_path / "c")
    left = tmp_path / ".c.partial-0123abcd"
    left.mkdir()
    (left / "models").mkdir()
    accelerator.save_state(tmp_path / "c")
    assert str(left) in caplog.text
    assert left.exists(), "another process may be writing it"
    assert check(tmp_path / "c") == 1.0


def test_what_the_disk_says_while_a_file_is_being_written_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FLUSHED", 1 << 20)
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:  # the system tells an error once
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with (
        pytest.raises(CheckpointError, match=r"can't write .*big: Input/output error"),
        files.create(tmp_path / "big") as file,
    ):
        file.write(bytes(1 << 20))
