"""Every error this library raises on purpose. Each message says what was found, where, and what to do about it."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "CollectiveMismatchError",
    "ConfigError",
    "DrivetrainError",
    "EngineError",
    "LaunchError",
    "PluginError",
    "PluginNotFoundError",
    "StateConflictError",
    "add_note",
]


class DrivetrainError(RuntimeError):
    """Base of all errors of this library."""


class ConfigError(DrivetrainError, ValueError):
    """A setting is unknown, of the wrong type or impossible; the text names file, line, column and key."""


class PluginError(DrivetrainError):
    """A plugin could not be loaded, or broke the contract; the text names plugin, distribution and cure."""


class EngineError(PluginError):
    """A plugin is sound, but its engine is not installed in a version that fits; the text names the requirement."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed plugin has the name that was asked for."""


class StateConflictError(DrivetrainError, ValueError):
    """The process already runs with other settings than the ones asked for now."""


class CheckpointError(DrivetrainError):
    """A checkpoint could not be written or read; the text names rank, path and cause. Raised on all ranks."""


class CollectiveError(DrivetrainError):
    """A collective did not come through: another rank ended, or did not come within the collective timeout."""


class CollectiveMismatchError(DrivetrainError):
    """Ranks came to the same collective with different structures, shapes or dtypes; raised on all of them."""


class LaunchError(DrivetrainError):
    """A launched process failed; the text has its rank, exit code and traceback.

    Args:
        rank: Of the process that failed first.
        exit_code: Its exit code, or 128 and the number of the signal that killed it.
        detail: How it ended, its traceback included.
    """

    def __init__(self, rank: int, exit_code: int, detail: str) -> None:
        super().__init__(f"rank {rank} failed first: {detail}")
        self.rank = rank
        self.exit_code = exit_code
        self.detail = detail

    def __reduce__(self) -> tuple[type[LaunchError], tuple[int, int, str]]:
        return type(self), (self.rank, self.exit_code, self.detail)


def add_note(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error`` so that tracebacks show it, once.

    Python 3.10 has no ``BaseException.add_note``: there the note joins the message.
    """
    if note in getattr(error, "__notes__", ()):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str) and note not in error.args[0]:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
