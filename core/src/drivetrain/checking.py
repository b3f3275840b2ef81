"""Settings beyond their types: the plugins they name, and the sections of plugins. Imports no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from drivetrain import registry
from drivetrain.config.problems import listed
from drivetrain.config.resolved import Resolved
from drivetrain.discovery import Entry
from drivetrain.errors import ConfigError, DrivetrainError, EngineError, PluginError, PluginNotFoundError

__all__ = [
    "NAMING",
    "check_sections",
    "contradictions",
    "engines_missing",
    "idle_settings",
    "named",
    "problems_of",
    "sections_in_force",
    "telling_all",
]

NAMING = ("backend", "device", "mixed_precision")
"""Settings whose value is the name of a plugin."""


def named(resolved: Resolved, key: str) -> Entry | None:
    """The plugin that a setting names; None where it names none: ``auto``, a family, or nobody has given it.

    Args:
        resolved: The settings.
        key: One of ``NAMING``.

    Raises:
        PluginError: There is no such plugin, or there are two.
    """
    name, origin = resolved.value(key), resolved.origin(key)
    if name is None or origin.source == "default" or (key == "device" and name == "auto"):
        return None  # core's own answer, whoever else has a plugin of that name
    if key == "mixed_precision":
        return registry.find_precision(name, where=origin.where)
    return registry.find(key, name, where=origin.where)


def problems_of(resolved: Resolved) -> list[str]:
    """What is wrong with the plugins that settings choose, and with their sections; a message for each problem.

    An engine that is missing is none of them, see :func:`engines_missing`.
    """
    chosen, failures = _chosen(resolved)
    problems = [text for text, error in failures if not isinstance(error, EngineError)]
    told: set[str] = set()
    for entry, where in chosen:
        try:
            registry.describe(entry)
        except PluginError as error:
            told.add(str(error))
            problems.append(f"{where}: {error}")
    broken: list[str] = []
    found = _problems_in_sections(resolved, broken)
    return [*problems, *(text for text in broken if text not in told), *found]


def contradictions(resolved: Resolved) -> list[str]:
    """A message for each pair of settings that exclude each other, as a launch would find out; see :func:`problems_of`.

    Imports no engine, and touches no device.
    """
    from drivetrain.launch import plan, prepare

    found = plan.contradictions(resolved)
    with contextlib.suppress(PluginError):  # told by problems_of, or by engines_missing
        backend = named(resolved, "backend")
        if backend is not None and not resolved.problems(backend.name, registry.load(backend).Config):
            try:
                prepare.check_processes(resolved, backend)
            except ConfigError as error:
                found.append(str(error))
    return found


def engines_missing(resolved: Resolved) -> list[str]:
    """A message for each plugin that settings choose whose engine is not installed here in a version that fits.

    Told apart from problems, since settings may be made for another machine. Imports no engine.
    """
    chosen, failures = _chosen(resolved)
    missing = [text for text, error in failures if isinstance(error, EngineError)]
    for entry, where in chosen:
        try:
            registry.load(entry)
        except EngineError as error:
            missing.append(f"{where}: {error}")
        except PluginError:
            continue  # told by problems_of
    return missing


def _chosen(resolved: Resolved) -> tuple[list[tuple[Entry, str]], list[tuple[str, DrivetrainError]]]:
    """The plugins that settings choose, each with where; and messages on those that can't be had, each with its error.

    What only a device can decide is left out: which device ``auto`` means, and which member of a family of precisions.
    """
    chosen: list[tuple[Entry, str]] = []
    failures: list[tuple[str, DrivetrainError]] = []
    for key in NAMING:
        try:
            if entry := named(resolved, key):
                chosen.append((entry, resolved.origin(key).where))
        except DrivetrainError as error:
            failures.append((str(error), error))
    if resolved.run.backend is None and (resolved.run.num_processes or 1) > 1:
        where = resolved.origin("num_processes").where
        try:
            chosen.append((registry.choose_default_backend(), where))
        except PluginError as error:
            failures.append((f"{where}: {error}", error))
    return chosen, failures


def check_sections(resolved: Resolved) -> None:
    """Refuse sections with mistakes in them, also those of plugins that are not chosen: one file serves several.

    A plugin that can't be loaded is left out: who did not choose it is not concerned.

    Raises:
        ConfigError: It lists them all.
    """
    if problems := _problems_in_sections(resolved, broken=[]):
        raise listed(problems)


def _problems_in_sections(resolved: Resolved, broken: list[str]) -> list[str]:
    """A message for each problem; plugins that can't say what their sections are go to ``broken``."""
    problems: list[str] = []
    for name in resolved.sections():
        for entry in _providers(name):
            with _noting(broken):
                problems += resolved.problems(entry.name, registry.describe(entry).Config)
    return problems


def idle_settings(resolved: Resolved, chosen: Collection[str | None]) -> list[str]:
    """A note for each setting on the command line that belongs to a plugin which takes no part.

    Args:
        resolved: The settings.
        chosen: Names of the plugins that do, and of families one member of which does.
    """
    names = [name for name in resolved.sections() if _providers(name) and not _takes_part(name, chosen)]
    return [
        f"{row.key} ({row.origin}) has no effect: {row.key.partition('.')[0]} takes no part in this run"
        for row in resolved.rows()
        if row.key.partition(".")[0] in names and row.origin.source == "command line"
    ]


def _takes_part(name: str, chosen: Collection[str | None]) -> bool:
    if name in chosen:
        return True
    precision = registry.describe_all("precision").get(name)
    return precision is not None and precision.family is not None and precision.family in chosen


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except DrivetrainError as error:
        problems.append(str(error))


def _providers(name: str) -> list[Entry]:
    """Plugins whose section has this name. Trackers have none that a class describes."""
    return [entry for role in registry.GROUPS for entry in registry.entries()[role].get(name, ())]


@contextlib.contextmanager
def telling_all(resolved: Resolved) -> Iterator[None]:
    """Context in which an error over settings becomes one that lists everything wrong with them.

    Plugins are chosen one after the other, so the first that can't be had would be told alone.

    Raises:
        ConfigError: In place of the error, with a line for each problem, where there are several.
    """
    try:
        yield
    except (ConfigError, PluginNotFoundError) as error:
        problems = problems_of(resolved)
        if len(problems) > 1 and any(problem in str(error) for problem in problems):
            raise listed(problems) from None
        raise


def sections_in_force(resolved: Resolved) -> dict[str, Any]:
    """Sections of the plugins that are chosen, and those that were given, as their classes made them, by name.

    A section in which something is wrong has its defaults.
    """
    entries = [entry for name in resolved.sections() for entry in _providers(name)]
    entries += [entry for entry, _ in _chosen(resolved)[0]]
    made: dict[str, Any] = {}
    for entry in entries:
        if entry.name not in made:
            with _noting([]):  # told by problems_of
                made[entry.name] = _made(resolved, entry.name, registry.describe(entry).Config)
    return made


def _made(resolved: Resolved, name: str, cls: type) -> Any:
    try:
        return resolved.section(name, cls)
    except ConfigError:
        return cls()
