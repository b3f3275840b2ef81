"""Which file the settings are read from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from drivetrain.config.values import Origin, Table, Value

__all__ = ["default_config_file", "read_config_file"]


def default_config_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The file that is read when none is named; it need not exist.

    It is ``default_config.yaml`` in ``$DRIVETRAIN_HOME``, else in ``$XDG_CONFIG_HOME/drivetrain``, else in
    ``~/.config/drivetrain``. A ``default_config.json`` beside it is taken where there is no YAML.
    """
    if home := environment.get("DRIVETRAIN_HOME"):
        folder = Path(home).expanduser()
    elif xdg := environment.get("XDG_CONFIG_HOME"):
        folder = Path(xdg).expanduser() / "drivetrain"
    else:
        folder = Path(os.path.expanduser("~")) / ".config" / "drivetrain"
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
