"""Validators of the objects that users fill in, whose errors are made to be read: attrs' own print the whole field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["at_least", "of_type", "one_of"]

_WORDS: dict[type, str] = {bool: "True or False", int: "a whole number", str: "a text"}


def of_type(kind: type, *, optional: bool = False) -> Callable[..., None]:
    """The value is of a type; a truth value is no whole number.

    Args:
        kind: The type.
        optional: Whether it may be None too.
    """
    wanted = _WORDS.get(kind, f"a {kind.__module__}.{kind.__qualname__}") + (" or None" if optional else "")

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right and not (optional and value is None):
            raise TypeError(f"{field.name} must be {wanted}; got {value!r}")

    return check


def at_least(low: int, *, optional: bool = False) -> Callable[..., None]:
    """The value is a whole number from ``low``; arguments as of :func:`of_type`."""
    whole = of_type(int, optional=optional)

    def check(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        whole(instance, field, value)
        if value is not None and value < low:
            raise ValueError(f"{field.name} must be at least {low}; got {value}")

    return check


def one_of(*choices: Any) -> Callable[..., None]:
    """The value is one of these."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise ValueError(f"{field.name} must be {' or '.join(map(repr, choices))}; got {value!r}")

    return check
