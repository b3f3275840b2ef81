"""Transformer Engine's recipes, made from a name and options."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from transformer_engine.common import recipe as engine

from drivetrain.errors import ConfigError

__all__ = ["make", "multiple"]

_SECTION = "fp8-te"


def make(name: str | None, options: Mapping[str, Any]) -> Any:
    """A recipe of the engine.

    Args:
        name: Of its class; None: what the engine takes for the GPU at hand.
        options: By the names of its fields. Number formats are given by name, such as ``HYBRID``; what is a group of
            settings to the engine, such as ``fp8_gemm_fprop``, as a mapping.

    Raises:
        ConfigError: This engine has no such recipe or option, or refuses a value.
    """
    if name is None:
        from transformer_engine.pytorch import get_default_recipe

        return get_default_recipe()
    cls = getattr(engine, name, None)
    if cls is None:
        raise ConfigError(f"{_SECTION}.recipe: the installed Transformer Engine has no {name}; upgrade it")
    given = {
        option: _value(f"{name}.{option}", value, default)
        for option, value, default in _with_defaults(name, cls, options)
    }
    try:
        return cls(**given)
    except (AssertionError, TypeError, ValueError) as error:
        reason = " ".join(str(error).partition("For further information")[0].split())
        raise ConfigError(f"{_SECTION}.options: {name} refuses {dict(options)}: {reason}") from error


def _with_defaults(what: str, cls: type, options: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Options with their values and defaults. The engine itself would pass over one that it does not know."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for option, value in options.items():
        if option not in fields:
            close = difflib.get_close_matches(option, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f". It has: {', '.join(fields)}"
            raise ConfigError(f"{_SECTION}.options: {what} has no option {option!r}{hint}")
        yield option, value, fields[option].default


def _value(option: str, value: Any, default: Any) -> Any:
    """A plain value as the engine wants it: what its default is of tells."""
    if isinstance(default, Enum) and isinstance(value, str):
        members = type(default).__members__
        if value.upper() not in members:
            raise ConfigError(f"{_SECTION}.options: {option}: {value!r} is none of {', '.join(members)}")
        return members[value.upper()]
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        given = {name: each for name, each, _ in _with_defaults(option, type(default), value)}
        return dataclasses.replace(default, **given)  # type: ignore[type-var]
    return value


def multiple(recipe: Any) -> int:
    """What both dimensions of a weight must be a multiple of: the blocks that share a scale are not cut."""
    if isinstance(recipe, engine.Float8BlockScaling):
        return 128
    if isinstance(recipe, engine.MXFP8BlockScaling):
        return 32
    return 16
