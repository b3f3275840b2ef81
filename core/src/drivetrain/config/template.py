"""Files of settings that are written: one to start from, with everything not chosen as comments, or a bare one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from drivetrain.config.files import default_config_file, expanded
from drivetrain.config.layers import from_arguments
from drivetrain.config.problems import fail
from drivetrain.config.resolve import merged_layers
from drivetrain.config.schema import RunConfig, field_names, help_text
from drivetrain.config.values import Origin, Value
from drivetrain.errors import ConfigError

__all__ = ["config_text", "settings_text", "write_basic_config", "write_config_file", "write_file"]

_HEAD = """\
# Settings of drivetrain. Commented lines show the defaults.
# Environment variables (DRIVETRAIN_NUM_PROCESSES=2) and flags (--num_processes 2) win over this file;
# `drivetrain config show` prints every value with its origin.
"""
_TAIL = """
# The settings of a plugin stand in a section of its name; `drivetrain plugins` lists those installed.
"""


def config_text(chosen: Mapping[str, Any]) -> str:
    """A commented YAML file.

    Args:
        chosen: Values by dotted key; strings are read like scalars of the file.

    Raises:
        ConfigError: A value is wrong, a key unknown, or two exclude each other: what ``drivetrain config check`` finds.
    """
    from drivetrain.checking import contradictions, problems_of  # loads the plugins that are named

    layer = from_arguments(chosen, Origin("command line"))
    resolved = merged_layers((layer,))
    if problems := [*problems_of(resolved), *contradictions(resolved)]:
        fail(problems)
    lines = [_HEAD]
    for field in attrs.fields(RunConfig):
        value = getattr(resolved.run, field.name)
        text = _yaml({field.name: attrs.asdict(value) if attrs.has(type(value)) else value})
        commented = text if field.name in layer.content else "".join(f"# {line}\n" for line in text.splitlines())
        lines.append(f"\n# {help_text(field.name)}\n{commented}")
    lines.append(_TAIL)
    lines += [_yaml({name: _written(layer.content[name])}) for name in resolved.sections()]
    return "".join(lines)


def settings_text(layer: Value) -> str:
    """The settings of a layer as YAML: those of core in the order of the documentation, then sections."""
    core = [name for name in field_names() if name in layer.content]
    sections = [name for name in layer.content if name not in core]
    return "".join(_yaml({name: _written(layer.content[name])}) for name in (*core, *sections))


class _Word(str):
    """A word that YAML takes for a boolean. Only a plugin's class knows which is meant, so it is written as it was."""


class _Dumper(yaml.SafeDumper):
    """Writes such words without quotes."""


_Dumper.add_representer(_Word, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:bool", word))


def _written(value: Value) -> Any:
    if value.is_table:
        return {key: _written(item) for key, item in value.content.items()}
    if isinstance(value.content, list):
        return [_written(item) for item in value.content]
    return _Word(value.text) if isinstance(value.content, bool) and value.text else value.content


def _yaml(data: dict[str, Any]) -> str:
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=10_000
    )
    return text


def write_config_file(
    config_file: str | os.PathLike[str] | None,
    chosen: Mapping[str, Any],
    environment: Mapping[str, str],
    overwrite: bool = False,
) -> tuple[Path, bool]:
    """Write ``config_text(chosen)``; into the file that would be read if none is named.

    Returns:
        The file, and whether there was one before.

    Raises:
        ConfigError: A value is wrong, the file exists and may not be replaced, or it can't be written.
    """
    text = config_text(chosen)
    named = config_file if config_file is not None else environment.get("DRIVETRAIN_CONFIG") or None
    if named is not None:
        path = expanded(named)
        return path, write_file(path, text, overwrite)
    path = _default_to_write(environment)
    exists = _check_absent(path, overwrite)
    path = path.with_suffix(".yaml")  # wins over a JSON file in the same place
    write_file(path, text, overwrite)
    return path, exists


def _default_to_write(environment: Mapping[str, str]) -> Path:
    path = default_config_file(environment)
    if path.parts[0] == "~":
        raise ConfigError(
            "the default file has no place: there is no home folder (HOME is not set); name a file, "
            "or set DRIVETRAIN_HOME to the folder for it"
        )
    return path


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | None:
    """Write a file of settings from a program, as ``drivetrain config`` does; one that is there is left alone.

    Args:
        mixed_precision: Number formats.
        save_location: The file; None: the one that is read where none is named.

    Returns:
        The file; None if there was one already.

    Raises:
        ConfigError: A value is wrong, or the file can't be written.
    """
    path = _default_to_write(os.environ) if save_location is None else expanded(save_location)
    if os.path.lexists(path):
        return None
    write_file(path, config_text({"mixed_precision": mixed_precision}), overwrite=False)
    return path


def write_file(path: Path, text: str, overwrite: bool) -> bool:
    """Write a file of settings, whole or not at all; its folder is made if need be.

    Returns:
        Whether there was one before.

    Raises:
        ConfigError: There is one and it may not be replaced, or it can't be written.
    """
    exists = _check_absent(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    return exists


def _check_absent(path: Path, overwrite: bool) -> bool:
    exists = os.path.lexists(path)
    if exists and not overwrite:
        raise ConfigError(f"{path} exists already; --overwrite replaces it")
    return exists


def _write(path: Path, text: str) -> None:
    """Write aside and rename, so that a full disk never leaves half a file, or none where there was one.

    A link stays one, and what it leads to is written. Who may read the file is decided by the umask, or by the file
    that is replaced.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
