"""What the checks found, as a table one can publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs

from drivetrain.testing.conformance.checks import GROUPS, ConformanceCheck

__all__ = ["STATUSES", "Outcome", "Report"]

Status = Literal["passed", "skipped", "known", "failed"]
STATUSES: tuple[Status, ...] = ("passed", "skipped", "known", "failed")


@attrs.frozen
class Outcome:
    """What one check found in one world."""

    check: ConformanceCheck
    size: int | None
    """Processes of the world; None for a check that needs none."""
    status: Status
    detail: str = ""
    """Why it was skipped or is known, or what was wrong."""
    trace: str = ""
    """Where an unexpected exception came from."""
    seconds: float = 0.0
    """What it took; in the first check of a world also what it took to bring that up."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        own = {"group": self.check.group, "check": self.check.name}
        rest = attrs.asdict(self, filter=attrs.filters.exclude("check"))
        return {**own, **rest, "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        world = "" if self.size is None else f" [{self.size} process{'es' if self.size > 1 else ''}]"
        return f"{self.check}{world}" + (f"\n    {self.detail}" if self.detail else "")


@attrs.define
class Report:
    """The outcomes of a suite.

    Args:
        title: What was examined.
    """

    title: str
    outcomes: list[Outcome] = attrs.field(factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything is wrong that was not known."""
        return any(outcome.status == "failed" for outcome in self.outcomes)

    def of(self, status: Status) -> list[Outcome]:
        """The outcomes of a status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    def counts(self) -> dict[str, Counter[Status]]:
        """How many outcomes of each status there are, by group."""
        found: dict[str, Counter[Status]] = {}
        for group in GROUPS:
            statuses = Counter(outcome.status for outcome in self.outcomes if outcome.check.group == group)
            if statuses:
                found[group] = statuses
        return found

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a row for each group and one for all of them, a column for each of :data:`STATUSES`."""
        counts = self.counts()
        total = Counter(outcome.status for outcome in self.outcomes)
        return [_row(group, statuses) for group, statuses in counts.items()] + [_row("all", total)]

    def markdown(self) -> str:
        """The table, ready for a README."""
        lines = [("group", *STATUSES), ("---",) * (len(STATUSES) + 1), *self.rows()]
        return "\n".join(["| " + " | ".join(line) + " |" for line in lines])

    def summary(self) -> str:
        """One line."""
        total = Counter(outcome.status for outcome in self.outcomes)
        parts = [f"passed {total['passed']}", f"skipped {total['skipped']} (not claimed)", f"known {total['known']}"]
        return f"{self.title}: " + ", ".join([*parts, f"failed {total['failed']}"])

    def details(self) -> str:
        """Everything that did not simply pass, with the reason: the skipped in short, what is wrong at the end."""
        skipped = _by_reason(self.of("skipped"))
        known = [f"known: {outcome}" for outcome in self.of("known")]
        failed = [
            f"FAILED: {outcome}" + (f"\n{outcome.trace.rstrip()}" if outcome.trace else "")
            for outcome in self.of("failed")
        ]
        return "\n".join([*skipped, *known, *failed])

    def durations(self, count: int) -> str:
        """The checks that took longest, a line each, and what all of them took."""
        slowest = sorted(self.outcomes, key=lambda outcome: outcome.seconds, reverse=True)[:count]
        lines = [f"{one.seconds:7.1f} s  {attrs.evolve(one, detail='')}" for one in slowest]
        return "\n".join([*lines, f"{sum(one.seconds for one in self.outcomes):7.1f} s  in all"])

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "suite": self.title,
            "failed": self.failed,
            "counts": {group: dict(statuses) for group, statuses in self.counts().items()},
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
        }


def _row(name: str, statuses: Counter[Status]) -> tuple[str, ...]:
    return (name, *(str(statuses[status]) for status in STATUSES))


def _by_reason(skipped: Sequence[Outcome]) -> Iterable[str]:
    reasons: dict[str, list[Outcome]] = {}
    for outcome in skipped:
        reasons.setdefault(outcome.detail, []).append(outcome)
    for reason, outcomes in reasons.items():
        names = "; ".join(dict.fromkeys(str(outcome.check) for outcome in outcomes))
        yield f"skipped, since {reason}: {names}"
