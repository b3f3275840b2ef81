"""Which trackers a run has."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from drivetrain import registry
from drivetrain.errors import PluginError
from drivetrain.requirements import unmet
from drivetrain.tracking.tracker import GeneralTracker

__all__ = ["choose", "taken_along"]

logger = logging.getLogger(__name__)

_ALL = "all"


def choose(log_with: Any, logging_dir: Any) -> list[GeneralTracker | type[GeneralTracker]]:
    """The trackers that ``Accelerator(log_with=...)`` asks for.

    Args:
        log_with: Name of an installed tracker, a tracker object or class, a list of these, or ``"all"`` for every
            installed one that can be used.
        logging_dir: Where trackers write that want a directory; None: nowhere.

    Raises:
        PluginError: A tracker that was named is not installed or can't be used.
        TypeError: An object is no tracker.
        ValueError: A tracker comes twice, or needs a directory and there is none.
    """
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    found: list[Any] = []
    for item in asked:
        found.extend(_usable(logging_dir) if item == _ALL else [_one(item, logging_dir)])
    names = [tracker.name for tracker in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"log_with has {', '.join(map(repr, twice))} more than once")
    return found


def taken_along(log_with: Any, chosen: Sequence[GeneralTracker | type[GeneralTracker]]) -> set[str]:
    """Names of those of the chosen trackers that only ``"all"`` asks for: the run can do without each of them."""
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    if _ALL not in asked:
        return set()
    return {tracker.name for tracker in chosen} - {item if isinstance(item, str) else item.name for item in asked}


def _usable(logging_dir: Any) -> list[Any]:
    """Every installed tracker that can be used. The others are named in a warning."""
    found = []
    for name in sorted(registry.entries()["tracker"]):
        try:
            found.append(_one(name, logging_dir))
        except (PluginError, ValueError) as error:
            logger.warning("log_with='all' leaves out %s: %s", name, error)
    return found


def _one(item: Any, logging_dir: Any) -> GeneralTracker | type[GeneralTracker]:
    if isinstance(item, str):
        item = _installed(item)
    kind: Any = item if inspect.isclass(item) else type(item)
    if not issubclass(kind, GeneralTracker):
        raise TypeError(f"log_with takes names, GeneralTracker classes and objects; got a {kind.__qualname__}")
    if not isinstance(getattr(item, "name", None), str):
        raise TypeError(f"tracker {kind.__qualname__} has no name; set the class attribute `name`")
    if kind is item and kind.requires_logging_directory and logging_dir is None:
        raise ValueError(
            f"tracker {kind.name!r} writes files and needs a directory: Accelerator(project_dir=...), or "
            f"ProjectConfiguration(logging_dir=...)"
        )
    return item


def _installed(name: str) -> type[GeneralTracker]:
    entry = registry.find("tracker", name)
    found = registry.load(entry)
    if not issubclass(found, GeneralTracker):
        raise PluginError(f"{entry} can't be used: {found.__qualname__} is no subclass of GeneralTracker")
    missing = unmet(found.requires)
    if missing:
        raise PluginError(f"{entry} can't be used: it {'; it '.join(missing)}")
    return found
