"""What is checked beyond the core's own settings: the plugins that are named, and the sections of plugins."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from drivetrain import registry
from drivetrain.config.resolve import resolve
from drivetrain.config.resolved import Resolved
from drivetrain.errors import ConfigError, DrivetrainError

__all__ = ["check_config_file", "problems_of"]


def check_config_file(file: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Check a file alone, without the settings of this environment.

    Returns:
        Its path, None if there is no file, and the sections it has.

    Raises:
        ConfigError: With one line for every problem.
    """
    location = ("DRIVETRAIN_CONFIG", "DRIVETRAIN_HOME", "XDG_CONFIG_HOME")
    environment = {name: os.environ[name] for name in location if name in os.environ}
    resolved = resolve(file, {}, environment=environment)
    if problems := problems_of(resolved):
        raise ConfigError("\n".join(problems))
    return resolved.config_file, resolved.sections()


def problems_of(resolved: Resolved) -> list[str]:
    """What is wrong with the plugins that settings name, and with their sections. Imports no engine.

    Returns:
        A message for each problem; a section with several has one message of several lines.
    """
    problems: list[str] = []
    _note(problems, lambda: _find(resolved, "backend", "backend"))
    _note(problems, lambda: _find(resolved, "device", "device"))
    _note(problems, lambda: _find(resolved, "precision", "mixed_precision"))
    for name in resolved.sections():
        for entry in _providers(name):
            _note(problems, functools.partial(_build, resolved, entry))
    return problems


def _note(problems: list[str], check: Callable[[], object]) -> None:
    try:
        check()
    except DrivetrainError as error:
        problems.append(str(error))


def _build(resolved: Resolved, entry: registry.Entry) -> None:
    resolved.section(entry.name, registry.load(entry).Config)


def _find(resolved: Resolved, role: str, key: str) -> None:
    name = resolved.value(key)
    if name is None or resolved.origin(key).source == "default" or (role == "device" and name == "auto"):
        return  # core's own answer, whoever else has a plugin of that name
    if role == "precision" and name not in registry.entries()[role]:
        found, _ = registry.load_all(role)
        if any(getattr(cls, "family", None) == name for cls in found.values()):
            return
    registry.find(role, name, where=resolved.origin(key).where)


def _providers(name: str) -> list[registry.Entry]:
    """Plugins whose section has this name. Trackers have none that a class describes."""
    return [entry for role in registry.GROUPS for entry in registry.entries()[role].get(name, ())]
