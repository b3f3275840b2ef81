"""What an Accelerator does with trackers."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain import state
from drivetrain.errors import DrivetrainError, add_note
from drivetrain.tracking.choosing import choose, taken_along
from drivetrain.tracking.tracker import GeneralTracker, NoTracker

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["TrackingMixin"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class TrackingMixin:
    """Metrics, to any number of trackers."""

    run: Run

    def _set_up_tracking(self, log_with: Any, logging_dir: Any) -> None:
        self._chosen_trackers = choose(log_with, logging_dir)
        self._dispensable = taken_along(log_with, self._chosen_trackers)
        self._logging_dir = logging_dir
        self._started = False
        self.trackers: list[GeneralTracker] = []
        """Trackers of this process, once ``init_trackers`` has been called."""

    @property
    def log_with(self) -> list[str]:
        """Names of the trackers of the run."""
        return [tracker.name for tracker in self._chosen_trackers]

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers that ``log_with`` named. Needs no other process.

        One that only ``"all"`` asked for and that can't start is left out with a warning.

        Args:
            project_name: Name of the project or run.
            config: Settings to store with the run.
            init_kwargs: Options by name of tracker; they win over the tracker's section of the YAML.

        Raises:
            DrivetrainError: The trackers were started before.
            TypeError: ``project_name`` is no text.
            ValueError: ``init_kwargs`` names a tracker that ``log_with`` does not.
        """
        if not isinstance(project_name, str):
            raise TypeError(f"init_trackers takes the name of a project first; got {project_name!r}")
        if self._started:
            raise DrivetrainError("the trackers are running already; end_training() ends them")
        given = init_kwargs or {}
        unknown = sorted(set(given) - set(self.log_with))
        if unknown:
            raise ValueError(f"init_kwargs has {', '.join(unknown)}, but log_with has: {', '.join(self.log_with)}")
        self._started = True
        for chosen in list(self._chosen_trackers):
            if chosen.main_process_only and self.run.world.rank != 0:
                continue
            try:
                tracker = _explained(chosen.name, functools.partial(self._begin, chosen, project_name, given))
            except Exception as error:
                if chosen.name not in self._dispensable:
                    raise
                logger.warning("log_with='all' leaves out %s: %s: %s", chosen.name, type(error).__name__, error)
                self._chosen_trackers.remove(chosen)
                continue
            self.trackers.append(tracker)
            if config is not None:
                _explained(chosen.name, functools.partial(tracker.store_init_configuration, config))

    def _begin(
        self,
        chosen: GeneralTracker | type[GeneralTracker],
        project_name: str,
        given: Mapping[str, Mapping[str, Any]],
    ) -> GeneralTracker:
        tracker: GeneralTracker = chosen if not inspect.isclass(chosen) else self._make(chosen, project_name, given)
        tracker.start()
        return tracker

    def _make(
        self, kind: type[GeneralTracker], project_name: str, given: Mapping[str, Mapping[str, Any]]
    ) -> GeneralTracker:
        runtime = state.current()
        options = dict((runtime.resolved.value(kind.name) if runtime is not None else None) or {})
        options.update(given.get(kind.name, {}))
        if kind.requires_logging_directory:
            Path(self._logging_dir).mkdir(parents=True, exist_ok=True)
            options.setdefault("logging_dir", str(self._logging_dir))
        return kind(project_name, **options)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand values to all trackers of this process. They are logged as they are: gather or reduce them first.

        Args:
            values: Numbers, 0-d tensors or texts by name.
            step: Which step they belong to.
            log_kwargs: Further arguments by name of tracker.
        """
        for tracker in self.trackers:
            further = (log_kwargs or {}).get(tracker.name, {})
            _explained(tracker.name, functools.partial(tracker.log, values, step=step, **further))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name.

        Args:
            name: As in ``log_with``.
            unwrap: Return the engine's own object.

        Returns:
            On processes that do not track something that ignores every call.

        Raises:
            ValueError: ``log_with`` does not name it.
            DrivetrainError: The trackers have not been started.
        """
        if name not in self.log_with:
            raise ValueError(f"no tracker {name!r}; log_with has: {', '.join(self.log_with) or 'none'}")
        found = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if found is not None:
            return found.tracker if unwrap else found
        chosen = self._chosen_trackers[self.log_with.index(name)]
        if self.run.world.rank == 0 or not chosen.main_process_only:
            raise DrivetrainError(f"tracker {name!r} is not running: call init_trackers first")
        return NoTracker()

    def end_training(self) -> None:
        """End the trackers, wait for all processes and take the world down. Call it at the end of the script."""
        ended, self.trackers, self._started = self.trackers, [], False
        failures: list[Exception] = []
        for tracker in ended:
            try:
                _explained(tracker.name, tracker.finish)
            except Exception as error:  # one tracker's failure must not keep the others, and the world, from ending
                failures.append(error)
        state.reset(failures[0] if failures else None)
        if failures:
            raise failures[0]


def _explained(name: str, call: Callable[[], _T]) -> _T:
    """Call, and note on an exception whose it is."""
    try:
        return call()
    except Exception as error:
        add_note(error, f"in tracker {name!r}")
        raise
