"""What a check is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    from drivetrain.testing.conformance.subject import Subject

__all__ = ["GROUPS", "CheckList", "ConformanceCheck", "Violation", "all_checks", "expect", "matching"]

GROUPS = ("static", "world", "numerics", "wiring", "data", "state", "collectives", "precision", "launch", "cost")
"""Groups in the order in which they run, from the cheapest and most basic on."""

# Each module has a list `checks`, in the order in which they run.
_MODULES = (
    "static",
    "world",
    "training",
    "updates",
    "clipping",
    "wiring",
    "data",
    "state",
    "collectives",
    "precision",
    "launching",
    "cost",
)


class Violation(AssertionError):  # noqa: N818 - it is no error of the program that raises it
    """A plugin did something else than the contract says."""


def expect(found: Any, expected: Any, what: str) -> None:
    """Raise a :class:`Violation` unless two values are equal."""
    if found != expected:
        raise Violation(f"{what}: expected {expected!r}, got {found!r}")


Where = Literal["each world", "largest world", "no world"]
Run = Callable[["Subject"], None]
Unclaimed = Callable[["Subject"], "str | None"]


def _claimed(subject: Subject) -> str | None:
    return None


@attrs.frozen
class ConformanceCheck:
    """One thing that a plugin must do right."""

    name: str
    """A sentence on the right behaviour, unique in the kit: what ``Known`` names."""
    group: str
    run: Run
    """Has ranks do something, and compares with an oracle. Raises :class:`Violation`."""
    unclaimed: Unclaimed = _claimed
    """Why this does not apply to what the plugins claim; None: it does."""
    where: Where = "each world"
    """In which worlds of the suite it runs; ``"no world"``: it needs no ranks."""

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


class CheckList(list[ConformanceCheck]):
    """The checks of one module; called, it decorates a function that is one.

    Args:
        group: Of :data:`GROUPS`; what all of them belong to.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def __call__(
        self, name: str, *, unclaimed: Unclaimed = _claimed, where: Where = "each world"
    ) -> Callable[[Run], Run]:
        """Add the decorated function as a check; arguments as the fields of :class:`ConformanceCheck`."""

        def add(run: Run) -> Run:
            self.append(ConformanceCheck(name, self.group, run, unclaimed, where))
            return run

        return add


def all_checks() -> tuple[ConformanceCheck, ...]:
    """Every check of the kit, in the order in which they run. One for each installed precision is among them."""
    modules = [import_module(f"{__package__}.{name}") for name in _MODULES]
    return tuple(check for module in modules for check in module.checks)


def matching(text: str | None) -> tuple[ConformanceCheck, ...]:
    """The checks whose group and name contain a text, in whatever case; None: all."""
    return tuple(check for check in all_checks() if text is None or text.lower() in str(check).lower())
