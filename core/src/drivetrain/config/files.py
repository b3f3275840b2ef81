"""Which file the settings are read from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from drivetrain.config.values import Origin, Table, Value
from drivetrain.errors import ConfigError

__all__ = ["default_config_file", "expanded", "read_config_file"]


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path as the shell reads it: ``~`` is the home folder. Where there is none, it stays as it is."""
    return Path(os.path.expanduser(path))  # Path.expanduser() would raise


def default_config_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The file that is read when none is named; it need not exist.

    It is ``default_config.yaml`` in ``$DRIVETRAIN_HOME``, else in ``$XDG_CONFIG_HOME/drivetrain``, else in
    ``~/.config/drivetrain``. A ``default_config.json`` beside it is taken where there is no YAML.
    """
    if home := environment.get("DRIVETRAIN_HOME"):
        folder = expanded(home)
    elif xdg := environment.get("XDG_CONFIG_HOME"):
        folder = expanded(xdg) / "drivetrain"
    else:
        folder = expanded("~") / ".config" / "drivetrain"
    file, twin = folder / "default_config.yaml", folder / "default_config.json"
    return twin if not os.path.lexists(file) and os.path.lexists(twin) else file


def read_config_file(
    config_file: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> tuple[str | None, Value]:
    """Read the named file, else ``$DRIVETRAIN_CONFIG``, else the default file if there is one.

    Returns:
        The file's path, None if there is none, and its settings.

    Raises:
        ConfigError: The file can't be read, is no mapping of settings, or is one of Accelerate's.
    """
    named = config_file if config_file is not None else environment.get("DRIVETRAIN_CONFIG") or None
    if named is not None:
        if not os.fspath(named):
            raise ConfigError("the config file that was named has an empty name")
        path = os.path.expanduser(os.fspath(named))
    else:
        default = default_config_file(environment)
        if not os.path.lexists(default):  # a dangling link is there, and reading it must fail
            return None, Value(Table(), Origin("default"))
        path = str(default)
    # The only reader of YAML files, imported when there is one: workers never pay for it.
    from drivetrain.config.migration import refuse_foreign
    from drivetrain.config.reader import read_file

    hint = "" if config_file is not None or named is None else " (named by DRIVETRAIN_CONFIG)"
    file = read_file(path, hint)
    refuse_foreign(path, file)
    return path, file
