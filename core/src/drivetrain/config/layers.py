"""The environment, the command line and code as layers of settings, in the shape the file has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from drivetrain.config.problems import did_you_mean, fail, problem
from drivetrain.config.schema import field_names
from drivetrain.config.sections import Sections
from drivetrain.config.values import Origin, Table, Value, from_python, insert, read_scalar
from drivetrain.errors import ConfigError

__all__ = ["PREFIX", "from_arguments", "from_environment"]

PREFIX = "DRIVETRAIN_"

# Variables with the prefix that are no settings: they say where settings are.
_RESERVED = frozenset({"CONFIG", "HOME", "RESOLVED"})


def from_arguments(arguments: Mapping[str, Any], origin: Origin) -> Value:
    """A layer of dotted keys (``"fsdp.reshard_after_forward"``). None means that the argument was not given.

    Args:
        arguments: Python values. Strings from a command line are read like scalars of the file.
        origin: The command line, or code.

    Raises:
        ConfigError: A key has an empty part, or a text that begins like a list or mapping is none.
    """
    layer = Value(Table(), origin)
    for key, content in arguments.items():
        if content is None:
            continue
        path = tuple(key.split("."))
        if not all(path):
            fail([problem(origin, key, "a key is names with dots between them, such as section.key")])
        typed = isinstance(content, str) and origin.source == "command line"
        layer = insert(layer, path, _from_text(content, origin, key) if typed else from_python(content, origin))
    return layer


def from_environment(environment: Mapping[str, str], sections: Callable[[], Sections]) -> Value:
    """The layer of ``DRIVETRAIN_*`` variables; two underscores stand for the dot (``DRIVETRAIN_FSDP__SOME_KEY``).

    An empty variable counts as not set. A name that resembles a setting is an error, for it is a typing error; other
    unknown names get a warning, for they may be somebody else's.

    Raises:
        ConfigError: With one line for every variable that is wrong.
    """
    layer, problems = Value(Table(), Origin("environment")), []
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in _RESERVED or not text:
            continue
        origin = Origin("environment", variable)
        try:
            if path := _path(name, origin, sections):
                layer = insert(layer, path, _from_text(text, origin, ".".join(path)))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        fail(problems)
    return layer


def _path(name: str, origin: Origin, sections: Callable[[], Sections]) -> tuple[str, ...] | None:
    """The keys a variable's name stands for; None if it is not ours."""
    first, *rest = name.lower().split("__")
    if first in field_names():
        return (first, *rest)
    # Names of plugins may have dashes; names of variables can't.
    known = {section.lower().replace("-", "_"): section for section in sections().installed}
    if first in known:
        return (known[first], *rest)
    if rest:
        fail([problem(origin, "", f"no section {first!r}{did_you_mean(first, known) or ' of an installed plugin'}")])
    hint = did_you_mean(first, field_names())
    if hint:
        fail([problem(origin, "", f"no setting {first!r}{hint}")])
    warnings.warn(f"{origin.where}: no setting of this name, ignored", stacklevel=2)
    return None


def _from_text(text: str, origin: Origin, key: str) -> Value:
    """Read what was typed in a shell: a scalar, a quoted one, or a list or mapping in brackets."""
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        from drivetrain.config.reader import parse

        try:
            value = parse(stripped, lambda mark: origin) or Value(None, origin)
            return attrs.evolve(value, text=stripped) if isinstance(value.content, list) else value
        except ConfigError as error:
            detail = str(error).removeprefix(f"{origin.where}: ")
            fail([problem(origin, key, f"{stripped!r} is not valid: {detail}")])
    return Value(read_scalar(stripped), origin, stripped)
