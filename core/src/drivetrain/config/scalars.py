"""One scalar of a wanted type out of a value, strictly: nothing is rounded, guessed or turned into text."""

from __future__ import annotations

import enum
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.config.problems import did_you_mean
from drivetrain.config.values import Value, display

__all__ = ["INVALID", "READERS", "MismatchError", "name_of", "read_literal", "read_object"]

INVALID: Any = object()
"""Stands for a value that could not be read; the reason is among the problems."""

_TYPE_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    pathlib.Path: "a path",
}
_LONGEST = 60


class MismatchError(Exception):
    """A value is not of the wanted type; the text says which one it is of."""


def name_of(thing: Any) -> str:
    """A type, or a value with its type, in the words of somebody who writes settings."""
    if isinstance(thing, Value):
        return _name_of_value(thing)
    if thing in _TYPE_NAMES:
        return _TYPE_NAMES[thing]
    container, arguments = typing.get_origin(thing) or thing, typing.get_args(thing)
    if container is typing.Union or container is types.UnionType:
        names = [name_of(argument) for argument in arguments]
        return ", ".join(names[:-1]) + f" or {names[-1]}"
    if container is typing.Literal:
        return "one of " + ", ".join(display(choice) for choice in arguments)
    if container in (list, tuple, set, frozenset):
        return "a list"
    if container is dict or hasattr(container, "__attrs_attrs__"):
        return "a mapping"
    return getattr(container, "__name__", str(container))


def _name_of_value(value: Value) -> str:
    content = value.content
    if content is None:
        return "nothing" if value.text == "" else "null"
    if isinstance(content, bool):
        return value.text or display(content)
    if isinstance(content, (int, float)):
        return f"the number {display(value)}"
    if isinstance(content, str):
        return f"the text {_shorten(repr(value.text or content))}"
    if isinstance(content, (list, tuple)):
        return f"the list {_shorten(display(content))}"
    if isinstance(content, Mapping):
        return "a mapping"
    return f"{type(content).__name__} {_shorten(repr(content))}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _expected(kind: Any, value: Value, hint: str = "") -> MismatchError:
    return MismatchError(f"expected {name_of(kind)}, got {name_of(value)}{hint}")


def _str(value: Value) -> str:
    content = value.content
    if isinstance(content, str):
        return content
    # Words such as no, off and yes are booleans to YAML 1.1. Where text is wanted, the text is what was written.
    if value.text is not None and (isinstance(content, bool) or value.from_shell):
        return value.text
    if value.text is not None and isinstance(content, (int, float)):
        raise _expected(str, value, f'; put it in quotes: "{value.text}"')
    raise _expected(str, value)


def _int(value: Value) -> int:
    if isinstance(value.content, int) and not isinstance(value.content, bool):
        return value.content
    quoted = isinstance(value.content, str) and re.fullmatch(r"[-+]?\d+", value.content.strip())
    raise _expected(int, value, _quotes_hint(value) if quoted else "")


def _float(value: Value) -> float:
    content = value.content
    if isinstance(content, (int, float)) and not isinstance(content, bool):
        try:
            return float(content)
        except OverflowError:
            raise MismatchError(f"{_shorten(str(content))} is too large for a number with a fraction") from None
    numeric = isinstance(content, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", content.strip())
    raise _expected(float, value, _quotes_hint(value) if numeric else "")


def _quotes_hint(value: Value) -> str:
    if value.text is not None:
        return "; write it without leading zeros"
    return "; leave out the quotes" if value.origin.source != "code" else ""


def _bool(value: Value) -> bool:
    if isinstance(value.content, bool):
        return value.content
    # 1 and 0 are the custom for switches in the environment, and only there.
    if value.origin.source == "environment" and value.text in ("0", "1"):
        return value.text == "1"
    quoted = isinstance(value.content, str) and value.content.lower() in ("true", "false", "yes", "no", "on", "off")
    raise _expected(bool, value, _quotes_hint(value) if quoted else "")


def _none(value: Value) -> None:
    if value.content is not None:
        raise _expected(type(None), value)


def _path(value: Value) -> pathlib.Path:
    return value.content if isinstance(value.content, pathlib.Path) else pathlib.Path(_str(value))


READERS: Mapping[Any, Callable[[Value], Any]] = {
    str: _str,
    int: _int,
    float: _float,
    bool: _bool,
    type(None): _none,
    None: _none,  # as list[None] holds it
    pathlib.Path: _path,
    os.PathLike: _path,
}
"""Reads a value as the type, or raises MismatchError."""


def read_literal(value: Value, choices: tuple[Any, ...]) -> Any:
    """The choice that was written. Choices are compared with their types: ``1`` is not ``True``."""
    for choice in choices:
        try:
            read = READERS[type(choice)](value) if type(choice) in READERS else value.content
        except MismatchError:
            continue
        if read == choice:
            return choice
    raise _no_choice(value, [display(choice) for choice in choices])


def _no_choice(value: Value, choices: list[str]) -> MismatchError:
    hint = did_you_mean(display(value), choices) or "."
    return MismatchError(f"{name_of(value)} is not a choice{hint} Choices: {', '.join(choices)}")


def read_object(value: Value, kind: Any) -> Any:
    """An instance of any other class. Only enumerations can be written; the rest can only be given in code."""
    container = typing.get_origin(kind) or kind
    content = value.content
    if isinstance(container, type) and isinstance(content, container):
        return content
    if isinstance(container, type) and issubclass(container, enum.Enum):
        written = display(value)
        for member in container:
            if content == member.value or written in (member.name, str(member.value)):
                return member
        raise _no_choice(value, [str(member.value) for member in container])
    if value.origin.source != "code":
        raise MismatchError(f"a {name_of(kind)} can't be written here; give it in code")
    raise MismatchError(f"expected {name_of(kind)}, got {name_of(value)}")
