"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["print_table"]

_WIDE = 1000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print rows of text. In a pipe, lines are as long as they need to be, so that they can be searched."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))  # Text, since cells may hold [brackets]
    console.print(table)
