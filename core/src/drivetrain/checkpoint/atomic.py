"""Putting a directory in place as a whole: written aside, then renamed.

``NAME`` is written as ``.NAME.partial-TOKEN`` beside it. A new ``NAME`` is one rename. An existing one steps aside
first, as ``.NAME.replaced-TOKEN``, and is deleted at the end: a crash between the two renames leaves both whole under
those names, where :func:`find` finds the new one and the next save tidies up. No crash leaves less than one whole
checkpoint.

A directory with a manifest is whole, since the manifest is the last file that is written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import attrs

from drivetrain.checkpoint.files import force_to_disk
from drivetrain.checkpoint.layout import MANIFEST, Manifest
from drivetrain.errors import CheckpointError

__all__ = ["Replacement", "find", "is_complete", "leftovers", "new_token", "remove"]


def new_token() -> str:
    """What tells one attempt at saving from another. Not drawn from a generator that training uses."""
    return secrets.token_hex(4)


def is_complete(directory: Path) -> bool:
    """Whether a checkpoint is there and whole."""
    return (directory / MANIFEST).is_file()


@attrs.frozen
class Replacement:
    """A directory that is being written, and the place it is for. Used by one process of each storage.

    Attributes:
        target: Where the checkpoint will be.
        token: Of this attempt, the same on all ranks.
    """

    target: Path
    token: str

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return self.target.with_name(f".{self.target.name}.partial-{self.token}")

    @property
    def _replaced(self) -> Path:
        return self.target.with_name(f".{self.target.name}.replaced-{self.token}")

    def begin(self, top_names: Iterable[str]) -> None:
        """Make the directory to write to.

        Args:
            top_names: What the checkpoint will have in its top directory, as far as core knows.

        Raises:
            CheckpointError: The target can't be replaced.
        """
        _finish_last(self.target)
        self._check_target(set(top_names))
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir()

    def _check_target(self, top_names: set[str]) -> None:
        target = self.target
        if not target.exists() and not target.is_symlink():
            return
        if target.is_symlink() or not target.is_dir():
            what = "a symbolic link" if target.is_symlink() else "no directory"
            raise CheckpointError(f"{target} is {what}, so no checkpoint can be put in its place")
        if target.is_mount() or _is_worked_in(target):
            raise CheckpointError(
                f"{target} can't be replaced as a whole, since it is a mount point or the working directory is in it; "
                f"save to a directory inside it"
            )
        taken = sorted(path.name for path in foreign(target) if path.parent == target and path.name in top_names)
        if taken:
            raise CheckpointError(
                f"{target} has {', '.join(taken)} already, and it is no checkpoint of ours; save to another directory"
            )

    def commit(self) -> None:
        """Put the finished directory in place. What others had put into the one it replaces is kept."""
        for directory, _, _ in os.walk(self.partial):
            force_to_disk(Path(directory))
        replaces = self.target.exists()
        if replaces:
            self.target.rename(self._replaced)
        try:
            self.partial.rename(self.target)
        except OSError as error:
            if self.target.exists():
                raise CheckpointError(
                    f"another process put a checkpoint in {self.target} meanwhile, and that one stays; give each run a "
                    f"directory of its own"
                ) from error
            if replaces:
                self._replaced.rename(self.target)
            raise
        force_to_disk(self.target.parent)
        if replaces:
            _take_over(self._replaced, self.target)
            shutil.rmtree(self._replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written, as far as that is possible."""
        shutil.rmtree(self.partial, ignore_errors=True)


def _is_worked_in(directory: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(directory.resolve())
    except FileNotFoundError:  # the working directory was deleted
        return False


def foreign(directory: Path) -> list[Path]:
    """Entries that are no part of the checkpoint in a directory: whole directories where nothing in them is."""
    ours: set[str] = set()
    if is_complete(directory):
        ours = {MANIFEST, *Manifest.read(directory).files}
    parents = {str(parent) for name in ours for parent in Path(name).parents}
    found: list[Path] = []
    for place, directories, files in os.walk(directory):
        here = Path(place).relative_to(directory)
        for name in list(directories):
            if str(here / name) not in parents:
                directories.remove(name)
                found.append(directory / here / name)
        found += [directory / here / name for name in files if (here / name).as_posix() not in ours]
    return sorted(found)


def _take_over(old: Path, new: Path) -> None:
    """Move what others had put into ``old`` to the same place in ``new``, unless that has a file there itself."""
    for path in foreign(old):
        _move(path, new / path.relative_to(old))


def _move(path: Path, place: Path) -> None:
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    elif path.is_dir() and not path.is_symlink() and place.is_dir():
        for child in path.iterdir():
            _move(child, place / child.name)


def _siblings(target: Path, kind: str) -> list[Path]:
    """The newest first."""
    found: list[tuple[float, Path]] = []
    for path in target.parent.glob(f".{_escaped(target.name)}.{kind}-????????"):
        with contextlib.suppress(FileNotFoundError):  # another process finished meanwhile
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def find(target: Path) -> Path:
    """Where the checkpoint of that name is: in place, or aside if a save ended between two renames. Changes nothing."""
    if target.exists():
        return target
    for replaced in _siblings(target, "replaced"):
        token = replaced.name.rpartition("-")[2]
        partial = Replacement(target, token).partial
        return partial if is_complete(partial) else replaced
    return target


def _finish_last(target: Path) -> None:
    """Do what a save that ended between its renames had left to do."""
    found = find(target)
    if found != target:
        found.rename(target)
    for replaced in _siblings(target, "replaced"):
        if target.exists():
            _take_over(replaced, target)
            shutil.rmtree(replaced, ignore_errors=True)


def leftovers(target: Path) -> list[Path]:
    """What interrupted saves of that name left behind. It is never read; another process may be writing it."""
    return _siblings(target, "partial") if target.parent.is_dir() else []


def remove(directory: Path) -> None:
    """Delete a checkpoint so that at no time a part of it is left under its name."""
    aside = directory.with_name(f".{directory.name}.removed-{new_token()}")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(aside)
        shutil.rmtree(aside)
