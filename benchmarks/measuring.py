"""What the benchmarks share: statistics that survive a busy machine, tables, and results as JSON.

Other programs on a machine slow everything in phases. So each block measures every contender once, what is compared is
taken from the same block, and what is reported is the median over blocks with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Summary", "Times", "add_common_options", "machine", "table", "version", "write_results"]

RESULTS = Path(__file__).parent / "results"


@attrs.frozen
class Summary:
    """Median and quartiles of repeated measurements, in the unit of the values."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarize at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, scale: float = 1.0, digits: int = 0) -> str:
        """``median [first quartile, third quartile]``, each multiplied by ``scale``."""
        numbers = [f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high)]
        return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


@attrs.frozen
class Times:
    """What a call took, in seconds."""

    wall: float
    cpu: float
    """Of this process, in all its threads. Other programs on the machine hardly change it; waiting is not in it."""
    thread: float
    """CPU time of the calling thread, the one that runs the loop. On several ranks threads of the communication library
    wait for each other's messages beside it, and what they take varies by more than what any of the libraries adds."""

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Times:
        """Time a call."""
        wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        function()
        return cls(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal; all but the first column are numbers."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(headers), f"|{rule}|", *map(line, rows)])


def machine() -> dict[str, Any]:
    """Facts one needs to know about where numbers come from."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "drivetrain", "accelerate", "lightning-fabric")},
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None if it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write_results(name: str, rows: Sequence[dict[str, Any]], load_before: float) -> Path:
    """Write ``results/<name>.json``: the machine, and the rows with every single measurement.

    Args:
        name: Of the benchmark.
        rows: One for each line of the table.
        load_before: Load average when the benchmark began, to tell a busy machine from its own load.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"benchmark": name, "machine": {**machine(), "load": load_before}, "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def add_common_options(parser: argparse.ArgumentParser, blocks: int = 15) -> None:
    """Options of every benchmark."""
    parser.add_argument("--blocks", type=int, default=blocks, help="times that every contender is measured")
    parser.add_argument("--no_results", action="store_true", help="print the table only, write no JSON")
