"""From turns of the training loop to rows of a table: what each contender adds to a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from conductor import Measured, measure
from measuring import Summary, table

__all__ = ["measure_steps", "print_steps"]

_CLOCKS = ("thread", "cpu", "wall")


def measure_steps(
    case: Mapping[str, Any], contenders: Sequence[str], *, steps: int, blocks: int, launches: int = 1
) -> list[dict[str, Any]]:
    """Measure one case of ``training.Case``; returns a row for each contender, as plain values in seconds."""
    options = {**case, "steps": steps}
    measured = measure("training:build", contenders, options, ranks=case["ranks"], blocks=blocks, launches=launches)
    return [{**case, "contender": name, **_row(found, steps)} for name, found in measured.items()]


def _row(measured: Measured, steps: int) -> dict[str, Any]:
    turns = measured.turns
    row: dict[str, Any] = {"steps_in_a_turn": steps, "added_calls": measured.added_calls / steps}
    for clock in _CLOCKS:
        added = [turn.added(clock) / steps for turn in turns]
        row[clock] = {
            "reference": attrs.asdict(Summary.of([getattr(turn.reference, clock) / steps for turn in turns])),
            "added": attrs.asdict(Summary.of(added)),
            "relative": attrs.asdict(Summary.of([turn.relative(clock) for turn in turns])),
            "added_by_block": [round(value, 9) for value in added],
        }
    return row


def print_steps(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of one case: medians with quartiles, and as how many times drivetrain's addition, for a micro-batch."""
    own = next((row["thread"]["added"]["median"] for row in rows if row["contender"] == "drivetrain"), None)
    headers = [
        "us a step",
        "torch loop, CPU",
        "added, loop's thread",
        "times",
        "added, CPU",
        "added, wall",
        "step / torch's, wall",
        "added calls",
    ]
    cells = []
    for row in rows:
        thread, cpu, wall = row["thread"], row["cpu"], row["wall"]
        ratio = f"{thread['added']['median'] / own:.1f}" if own and own > 0 and row["contender"] != "torch" else ""
        cells.append(
            [
                row["contender"],
                f"{cpu['reference']['median'] * 1e6:.0f}",
                Summary(**thread["added"]).text(1e6),
                ratio,
                Summary(**cpu["added"]).text(1e6),
                Summary(**wall["added"]).text(1e6),
                Summary(**wall["relative"]).text(digits=2),
                f"{row['added_calls']:.0f}",
            ]
        )
    print(f"\n{title}\n\n{table(headers, cells)}", flush=True)
