"""What commands print."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence

__all__ = ["print_table", "stdout_kept_clean"]

_WIDE = 1000
_FOR_READING = 100
"""Columns of a table in a pipe, where ``$COLUMNS`` doesn't say."""
_FOR_PROSE = 20
"""Columns that sentences need at least beside the others."""


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    *,
    faint: Callable[[Sequence[str]], bool] = lambda row: False,
    prose: bool = False,
) -> None:
    """Print rows of text. In a pipe, lines are as long as they need to be, so that they can be searched.

    Args:
        columns: Headings.
        rows: A text for each column.
        title: Above the table.
        faint: Which rows are of little interest; a terminal shows them dimmed.
        prose: The last column holds sentences: it is wrapped in a pipe too, at a width that can be read, and all other
            columns are kept whole. Where there is no room for that, sentences stand below the rest of their row.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=shutil.get_terminal_size((_FOR_READING, 0)).columns if prose else _WIDE)
    rows = [tuple(row) for row in rows]
    if prose and _width(rows) + _FOR_PROSE > console.width:
        _print_paragraphs(rows)
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=prose and column != columns[-1])
    for row in rows:
        style = "dim" if faint(row) else None
        table.add_row(*(Text(cell, overflow="fold") for cell in row), style=style)  # cells may hold [brackets]
    console.print(table)


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Characters that all columns but the last need."""
    return sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1])


def _print_paragraphs(rows: Iterable[Sequence[str]]) -> None:
    """A row as a line and the sentences below it, where a table is too wide."""
    for *cells, sentences in rows:
        print(*cells)
        for line in sentences.splitlines():
            print(f"  {line}")


def stdout_kept_clean() -> contextlib.AbstractContextManager[object]:
    """Context in which what plugins print while they are imported goes to stderr: stdout may be read as JSON."""
    return contextlib.redirect_stdout(sys.stderr)
