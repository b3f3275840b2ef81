"""Where a project's checkpoints are, and how they are numbered."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import attrs

from drivetrain.errors import CheckpointError
from drivetrain.validators import at_least

__all__ = ["ProjectConfiguration", "absolute", "latest", "numbered", "prune"]

_NAME = re.compile(r"checkpoint_(\d+)")
_ASIDE = re.compile(r"\.(checkpoint_\d+)\.replaced-.{8}")
"""What stands for a checkpoint between the two renames that replace it."""
_INTERRUPTED = re.compile(r"\.checkpoint_(\d+)\.partial-.{8}")


def absolute(path: str | os.PathLike[str]) -> Path:
    """What a path means now: seen from the working directory, ``~`` replaced."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _note_place(configuration: ProjectConfiguration, _: Any, value: str | os.PathLike[str] | None) -> Any:
    configuration._place = None if value is None else absolute(value)
    return value


@attrs.define
class ProjectConfiguration:
    """Where a run keeps its files.

    Attributes:
        project_dir: Directory of the project; None: paths are given in each call. A relative one stays what it was when
            it was given, wherever the program goes.
        logging_dir: Directory for trackers; None: ``project_dir``.
        automatic_checkpoint_naming: Whether ``save_state()`` without a path writes
            ``project_dir/checkpoints/checkpoint_<iteration>``.
        total_limit: How many automatically named checkpoints are kept; the oldest go once a new one is in place.
        iteration: Number of the next automatically named checkpoint. Goes on after ``load_state``.
        save_on_each_node: Whether each machine has storage of its own, so that the first process of each writes what is
            the same on all. If not, all processes must see the same directory.
    """

    project_dir: str | os.PathLike[str] | None = attrs.field(default=None, on_setattr=_note_place)
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = attrs.field(default=None, validator=at_least(1, optional=True))
    iteration: int = attrs.field(default=0, validator=at_least(0))
    save_on_each_node: bool = False
    _place: Path | None = attrs.field(default=None, init=False, repr=False, eq=False)
    """What ``project_dir`` meant when it was set."""

    def __attrs_post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project directory; the logging directory follows it unless it was given."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    @property
    def checkpoints(self) -> Path:
        """Directory of automatically named checkpoints.

        Raises:
            CheckpointError: There is no project directory.
        """
        if self._place is None:
            raise CheckpointError(
                "automatic_checkpoint_naming needs a project directory: "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return self._place / "checkpoints"

    @property
    def next_checkpoint(self) -> Path:
        """Where the next automatically named checkpoint goes."""
        return self.checkpoints / f"checkpoint_{self.iteration}"


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints with automatic names, by number. Only exact names count."""
    from drivetrain.checkpoint.atomic import find, is_complete

    if not directory.is_dir():
        return []
    names = {_ASIDE.sub(r"\1", path.name) for path in directory.iterdir()}
    found = [(int(match[1]), directory / name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted((number, path) for number, path in found if is_complete(find(path)))


def latest(directory: Path) -> Path:
    """The complete checkpoint with the highest number.

    Raises:
        CheckpointError: There is none.
    """
    found = numbered(directory)
    if not found:
        there = sorted(path.name for path in directory.iterdir())[:5] if directory.is_dir() else []
        raise CheckpointError(
            f"there is no complete checkpoint_<number> in {directory}"
            + (f", which has: {', '.join(there)}" if there else ", which is empty or does not exist")
        )
    return found[-1][1]


def prune(directory: Path, limit: int, keep: Path) -> None:
    """Delete the oldest numbered checkpoints beyond ``limit``, never ``keep``. Called when ``keep`` is in place.

    What interrupted saves of lower numbers left goes too: a run that is stopped often would fill the disk with it.

    Raises:
        OSError: One can't be deleted.
    """
    from drivetrain.checkpoint.atomic import remove

    for half in directory.glob(".checkpoint_*.removed-????????"):  # an earlier deletion was interrupted
        shutil.rmtree(half)
    for path in directory.iterdir():
        interrupted = _INTERRUPTED.fullmatch(path.name)
        if interrupted and int(interrupted[1]) < int(keep.name.rpartition("_")[2]):
            shutil.rmtree(path)
    older = [path for _, path in numbered(directory) if path != keep]
    for path in older[: max(len(older) - (limit - 1), 0)]:
        remove(path)
