"""What an experiment tracker subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from drivetrain.plugin import Check

__all__ = ["GeneralTracker", "NoTracker", "on_main_process"]

_F = TypeVar("_F", bound=Callable[..., Any])


class GeneralTracker:
    """A tracker of one run.

    Only made where it is used: on the main process, unless ``main_process_only`` is False. The class must be importable
    without its engine, which :meth:`start` imports.

    A class with an ``__init__`` of its own, whose objects are given to ``log_with``, need not hand anything on.

    Args:
        run_name: Name of the project.
        **options: The tracker's own, from its section of the YAML and from ``init_trackers(init_kwargs=...)``; and
            ``logging_dir``, if it requires one.
    """

    name: ClassVar[str]
    """What it is called in ``log_with``."""
    requires_logging_directory: ClassVar[bool] = False
    """Whether it is made with ``logging_dir``, a directory that exists."""
    main_process_only: ClassVar[bool] = True
    """Whether the main process alone has one. If not, each process has one of its own."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Requirements of its engine (PEP 508), checked before it is used."""

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Rows for ``drivetrain doctor``, beside those on :attr:`requires`. Must not raise, nor reach for a service."""
        return ()

    def __init__(self, run_name: str = "", **options: Any) -> None:
        self.run_name = run_name
        self.options = options

    def start(self) -> None:
        """Begin the run. Called once, before anything is stored."""

    @property
    def tracker(self) -> Any:
        """The engine's own object, for what this class does not offer."""
        return None

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the run's settings. Called at most once, after :meth:`start`."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store values of one step.

        Args:
            values: Numbers, 0-d tensors or texts by name.
            step: Which step; None: the engine counts.
            **kwargs: The tracker's own.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no log()")

    def finish(self) -> None:
        """End the run; everything must be stored when this returns."""


class NoTracker:
    """Stands for a tracker where the process has none: every call and attribute of it does nothing."""

    def __getattr__(self, name: str) -> NoTracker:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoTracker:
        return self


def on_main_process(function: _F) -> _F:
    """Decorator for a tracker's methods: call it on the main process only, if the tracker is for that one only."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from drivetrain.state import PartialState

        if getattr(self, "main_process_only", True) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]
