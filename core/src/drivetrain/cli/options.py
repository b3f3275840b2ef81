"""Flags that commands share. Every flag has two spellings, ``--num_processes`` and ``--num-processes``."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import click

from drivetrain.config.schema import RunConfig, field_names, help_text
from drivetrain.config.values import read_scalar

__all__ = [
    "BothSpellings",
    "command_line",
    "config_file_option",
    "json_option",
    "option",
    "set_option",
    "setting_option",
    "setting_options",
]

F = TypeVar("F", bound=Callable[..., Any])


class BothSpellings(click.Option):
    """An option that is understood with underscores and with dashes, and listed once in the help."""

    def __init__(self, param_decls: Sequence[str] | None = None, **attributes: Any) -> None:
        given = list(param_decls or ())
        parts = [(name.partition("/")[0], name.partition("/")[2]) for name in given if name.startswith("--")]
        on = [_dashed(name) for name, _ in parts if "_" in name]
        off = [_dashed(name) for _, name in parts if "_" in name]
        self._twins = [*on, *off]
        # To click, a name after " /" switches off.
        super().__init__([*given, *on, *(f" /{name}" for name in off)], **attributes)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        names = record[0]
        for twin in self._twins:
            names = names.replace(f", {twin}", "")
        return names, record[1]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """``click.option`` for both spellings of every long name. Write the names with underscores."""
    return click.option(*names, cls=BothSpellings, **attributes)


def config_file_option(function: F) -> F:
    """``--config_file``, also as ``--config``."""
    text = "File of settings; else $DRIVETRAIN_CONFIG, else default_config.yaml in $DRIVETRAIN_HOME or "
    text += "~/.config/drivetrain."
    return _single("--config_file", "--config", "config_file", metavar="FILE", help=text)(function)


def _single(*names: str, **attributes: Any) -> Callable[[F], F]:
    """An option that takes one value. Given twice with two, it is an error: the first would be lost without a word."""

    def one(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
        if len(set(values)) > 1:
            raise click.BadParameter(f"is given twice: {values[0]!r} and {values[-1]!r}", ctx, param)
        return values[0] if values else None

    return option(*names, multiple=True, callback=one, **attributes)


def set_option(function: F) -> F:
    """``--set key=value``, any number of times; the parameter is ``assignments``."""
    text = "Any setting, also of a plugin: --set section.key=value. May be repeated."
    return option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help=text)(function)


def json_option(function: F) -> F:
    """``--json``; the parameter is ``as_json``."""
    return option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(function)


def setting_option(key: str, *names: str) -> Callable[[F], F]:
    """A flag for a core setting, with its help text. Its value is checked where all settings are, not by click.

    Args:
        key: The setting, and the parameter's name.
        names: Further spellings of the flag.
    """
    hint = typing.get_type_hints(RunConfig)[key]
    if hint is bool:
        return option(f"--{key}/--no_{key}", *names, key, default=None, help=help_text(key))
    return _single(f"--{key}", *names, key, metavar=_metavar(hint), help=help_text(key))


def _metavar(hint: Any) -> str:
    for kind in (hint, *typing.get_args(hint)):
        if typing.get_origin(kind) is typing.Literal:
            return "|".join(typing.get_args(kind))
        if kind in (int, float):
            return "NUMBER" if kind is int else "SECONDS"
    return "TEXT"


def setting_options(*keys: str) -> Callable[[F], F]:
    """Flags for several core settings; for all that are no mappings if none is named."""

    def decorate(function: F) -> F:
        for key in reversed(keys or _flat_keys()):
            function = setting_option(key)(function)
        return function

    return decorate


def _flat_keys() -> tuple[str, ...]:
    hints = typing.get_type_hints(RunConfig)
    return tuple(key for key in field_names() if not any(map(attrs.has, (hints[key], *typing.get_args(hints[key])))))


def command_line(flags: Mapping[str, Any], assignments: Sequence[str] = ()) -> dict[str, Any]:
    """Flags and ``--set`` as the command line's layer of settings, by dotted key.

    Args:
        flags: Values by key; None: not given.
        assignments: What ``--set`` collected.

    Raises:
        click.BadParameter: An assignment is no ``key=value``, or a key is given twice with different values.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise click.BadParameter(f"{assignment!r} is no KEY=VALUE", param_hint="'--set'")
        if given.get(key, value) != value and _meaning(given[key]) != _meaning(value):
            raise click.BadParameter(f"{key} is given twice: {given[key]!r} and {value!r}", param_hint="'--set'")
        given[key] = value
    return given


def _meaning(value: Any) -> Any:
    """A value of the command line as it will be read, to compare different spellings of it."""
    return read_scalar(value) if isinstance(value, str) else value
