"""Plugins for the tests of the conformance kit: one that is right, and many that are wrong in one way each.

Found by entry points that a fixture writes; the name of a class is the name of its plugin. Each says which check of the
kit it fails. A package that the workers import as the tests do, so its modules are as light as real plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import attrs

__all__ = ["FAILURES", "Failure", "fails"]

P = TypeVar("P", bound=type)


@attrs.frozen
class Failure:
    """That a plugin fails a check of the kit."""

    plugin: type
    check: str
    reason: str
    size: int
    precision: str | None

    def __str__(self) -> str:
        return f"{self.plugin.__name__}, {self.check[:40]}"


FAILURES: list[Failure] = []
"""Of all plugins in the modules imported so far."""


def fails(check: str, reason: str = "", size: int = 1, precision: str | None = None) -> Callable[[P], P]:
    """Note that the decorated plugin fails a check.

    Args:
        check: A part of its name that no other check has.
        reason: A part of what the kit says.
        size: Processes that show it.
        precision: Name of the precision it shows under; None: full precision.
    """

    def note(plugin: P) -> P:
        FAILURES.append(Failure(plugin, check, reason, size, precision))
        return plugin

    return note
