"""A file of settings to start from: what was chosen, and everything else as comments."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from drivetrain.config.files import default_config_file
from drivetrain.config.layers import from_arguments
from drivetrain.config.problems import fail
from drivetrain.config.resolved import Resolved
from drivetrain.config.schema import RunConfig, help_text
from drivetrain.config.sections import check_top_level, installed_sections
from drivetrain.config.values import Origin, Value
from drivetrain.errors import ConfigError

__all__ = ["config_text", "write_config_file"]

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
        ConfigError: A value is wrong, or a key unknown.
    """
    layer = from_arguments(chosen, Origin("command line"))
    problems: list[str] = []
    check_top_level(layer, installed_sections, problems)
    if problems:
        fail(problems)
    resolved = Resolved(layers=(layer,))
    lines = [_HEAD]
    for field in attrs.fields(RunConfig):
        value = getattr(resolved.run, field.name)
        text = _yaml({field.name: attrs.asdict(value) if attrs.has(type(value)) else value})
        commented = text if field.name in layer.content else "".join(f"# {line}\n" for line in text.splitlines())
        lines.append(f"\n# {help_text(field.name)}\n{commented}")
    lines.append(_TAIL)
    lines += [_yaml({name: _written(layer.content[name])}) for name in resolved.sections()]
    return "".join(lines)


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
    path = default_config_file(environment) if named is None else Path(named).expanduser()
    exists = os.path.lexists(path)
    if exists and not overwrite:
        raise ConfigError(f"{path} exists already; --overwrite replaces it")
    if named is None:
        path = path.with_suffix(".yaml")  # wins over a JSON file in the same place
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    return path, exists


def _write(path: Path, text: str) -> None:
    """Write aside and rename, so that a full disk never leaves half a file, or none where there was one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
