"""From an entry point to a checked class, and to an instance of it. What metadata can tell comes before the import."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from drivetrain.discovery import CORE, GROUPS, Entry, entries
from drivetrain.errors import ConfigError, EngineError, PluginError, add_note
from drivetrain.plugin import API, Backend, Device, KwargsHandler, Plugin, Precision
from drivetrain.requirements import unmet

__all__ = [
    "at_fault",
    "by_name",
    "create",
    "describe",
    "describe_all",
    "forget",
    "import_object",
    "load",
    "load_all",
    "refused",
    "stated",
]

T = TypeVar("T")

_BASES: Mapping[str, type] = {"backend": Backend, "device": Device, "precision": Precision, "keyword": KwargsHandler}

_fitting: set[str] = set()
"""Distributions whose requirements were found to be met."""
_described: dict[Entry, type[Any]] = {}
_checked: dict[Entry, type[Any]] = {}
"""Those whose engines fit, too."""


def forget() -> None:
    """Load everything anew when it is next asked for."""
    _fitting.clear()
    _checked.clear()
    _described.clear()


def load(entry: Entry) -> type[Any]:
    """The class of a plugin, checked. Loaded once per process.

    In this order: what its distribution requires, before any import; the import; that it is a class of its role; that
    it was written for this contract; what its engine requires, while the engine is still not imported.

    Raises:
        EngineError: The last of these failed.
        PluginError: Any other failed. An exception of the import is chained as the cause.
    """
    if entry not in _checked:
        found = describe(entry)
        if issubclass(found, Plugin):
            _check_engine(entry, found)
        _checked[entry] = found
    return _checked[entry]


def describe(entry: Entry) -> type[Any]:
    """The class of a plugin whose engine may be missing: for its settings, and all else that is said without one.

    Raises:
        PluginError: As of ``load``, but for the engine.
    """
    if entry not in _described:
        found = import_object(entry)
        _check_class(entry, found)
        if issubclass(found, Plugin):
            _check_api(entry, found)
        _described[entry] = found
    return _described[entry]


def import_object(entry: Entry) -> Any:
    """What an entry point names, if its distribution's requirements are met.

    Raises:
        PluginError: They are not, or the import failed. An exception of the import is chained as the cause.
    """
    _check_distribution(entry)
    module, colon, attribute = (part.strip() for part in entry.value.partition(":"))
    if not colon or not attribute:
        raise refused(entry, f"its entry point names no class: {entry.value!r} should read 'module:Class'")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("[")[0].strip().split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a plugin's module does, the message says whose it is
        raise refused(
            entry, f"importing {entry.value} raised {type(error).__name__}: {error}. `{CORE} doctor` examines plugins"
        ) from error
    return found


def _check_distribution(entry: Entry) -> None:
    if entry.distribution in _fitting:
        return
    missing = unmet(entry.requires)
    if missing:
        raise refused(entry, f"{entry.distribution} {entry.version} {'; '.join(missing)}. {_install(entry, missing)}")
    _fitting.add(entry.distribution)


def _install(entry: Entry, missing: Iterable[str]) -> str:
    if any(phrase.startswith(f"needs {CORE}") for phrase in missing):
        return f"Bring them to one version: pip install --upgrade {CORE} {entry.distribution}"
    return f"pip install --upgrade {entry.distribution} brings what it needs"


def refused(entry: Entry, reason: str) -> PluginError:
    """The error that says whose plugin can't be used, and why."""
    return PluginError(f"{entry} can't be used: {reason}")


def at_fault(entry: Entry, reason: str) -> PluginError:
    """The same where only a change of the plugin helps."""
    authors = f"Try another version of {entry.distribution}, or report it to its authors"
    return refused(entry, f"{reason}. {authors}")


def _check_class(entry: Entry, found: Any) -> None:
    base = _BASES.get(entry.role, object)
    if not isinstance(found, type):
        raise refused(entry, f"{entry.value} is no class, but of type {type(found).__name__}")
    if not issubclass(found, base):
        raise refused(entry, f"{entry.value} is no subclass of drivetrain.plugin.{base.__name__}")
    if issubclass(found, Plugin) and found.role != entry.role:
        raise refused(entry, f"its role is {found.role!r}, but its entry point is in the group {GROUPS[entry.role]!r}")
    if issubclass(found, Plugin) and not (isinstance(found.Config, type) and attrs.has(found.Config)):
        raise refused(
            entry,
            f"{found.__qualname__}.Config is {found.Config!r}, but the section of a plugin is described by an attrs "
            f"class; decorate it with @attrs.frozen",
        )


def _check_api(entry: Entry, found: type[Plugin]) -> None:
    api = getattr(found, "api", None)
    if not isinstance(api, tuple) or [type(part) for part in api] != [int, int]:
        raise refused(
            entry,
            f"{found.__qualname__}.api should be the contract version it was written for, such as api = (1, 0), "
            f"but is {'missing' if api is None else repr(api)}",
        )
    if api[0] == API[0] and api[1] <= API[1]:
        return
    older = entry.distribution if api < API else CORE
    raise refused(
        entry,
        f"it was written for plugin API {api[0]}.{api[1]}, but {CORE} here speaks {API[0]}.{API[1]}: "
        f"pip install --upgrade {older}",
    )


def _check_engine(entry: Entry, found: type[Plugin]) -> None:
    requires = found.requires
    if isinstance(requires, str):
        raise refused(entry, f"{found.__qualname__}.requires is a string; write a tuple: ({requires!r},)")
    missing = unmet(requires)
    if missing:
        cure = f"pip install {' '.join(map(repr, requires))}"
        raise EngineError(str(refused(entry, f"its engine doesn't fit: it {'; it '.join(missing)}; {cure}")))


def describe_all(role: str) -> dict[str, type[Any]]:
    """Every plugin of a role that can be described, by name; names as of ``load_all``."""
    described: dict[str, type[Any]] = {}
    for name, entry in by_name(role).items():
        with contextlib.suppress(PluginError):
            described[name] = describe(entry)
    return described


def load_all(role: str) -> tuple[dict[str, type[Any]], dict[str, PluginError]]:
    """Every plugin of a role, for guessing: those that load, and why the others don't, by name.

    Where two distributions use one name, both appear under their names in full.
    """
    loaded: dict[str, type[Any]] = {}
    broken: dict[str, PluginError] = {}
    for name, entry in by_name(role).items():
        try:
            loaded[name] = load(entry)
        except PluginError as error:
            broken[name] = error
    return loaded, broken


def by_name(role: str) -> dict[str, Entry]:
    """Every plugin of a role by a name that ``find`` understands."""
    return {
        name if len(providers) == 1 else entry.qualified: entry
        for name, providers in sorted(entries()[role].items())
        for entry in providers
    }


def create(entry: Entry, config: Any = None) -> Any:
    """An instance of a plugin, for one run.

    Args:
        entry: Which plugin.
        config: Instance of its ``Config`` class; None for the defaults.

    Raises:
        PluginError: It can't be loaded, or its ``__init__`` failed; the exception is chained as the cause.
        ConfigError: Its ``__init__`` refused the config, with a note whose it is.
    """
    found = load(entry)
    try:
        return found(config)
    except ConfigError as error:
        add_note(error, f"in {entry}")
        raise
    except Exception as error:
        raise at_fault(entry, f"{found.__qualname__}({config!r}) raised {type(error).__name__}: {error}") from error


def stated(entry: Entry, plugin: Plugin, fact: str, kind: type[T]) -> T:
    """What a plugin states of itself, as a property computed from its config.

    Args:
        entry: Whose it is.
        plugin: An instance of it.
        fact: Name of the property, such as ``"capabilities"``.
        kind: The class that the contract wants.

    Raises:
        PluginError: It is something else, or raised; the exception is chained as the cause.
        ConfigError: The config is impossible, by the plugin's own word, with a note whose it is.
    """
    try:
        found = getattr(plugin, fact)
    except ConfigError as error:
        add_note(error, f"in {entry}")
        raise
    except Exception as error:
        raise at_fault(entry, f"its {fact} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise at_fault(entry, f"its {fact} must be a drivetrain.plugin.{kind.__name__}, but is {found!r}")
    return found
