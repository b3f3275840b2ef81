"""What the library logs, for tasks on workers, where pytest's own fixture does not reach."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["log_lines"]


class _Keep(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def log_lines(name: str = "drivetrain") -> Iterator[list[str]]:
    """Gives a list that everything logged in the context, from level INFO on, is added to.

    Args:
        name: Of the logger; those below it count too.
    """
    lines: list[str] = []
    handler, logger = _Keep(lines), logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
