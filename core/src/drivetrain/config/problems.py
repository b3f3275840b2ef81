"""How faults of a configuration are worded: where, which key, what is wrong, all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from drivetrain.config.values import Origin
from drivetrain.errors import ConfigError

__all__ = ["did_you_mean", "fail", "problem"]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the choice closest to ``word``; empty if none is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def problem(origin: Origin, key: str, text: str) -> str:
    """One line: ``config.yaml:3:18: mixed_precision: expected ...``."""
    return ": ".join(part for part in (origin.where, key, text) if part)


def fail(problems: Sequence[str]) -> NoReturn:
    """Raise one error that lists every problem.

    Raises:
        ConfigError: Always.
    """
    if len(problems) == 1:
        raise ConfigError(problems[0])
    lines = "".join(f"\n  {line}" for line in problems)
    raise ConfigError(f"{len(problems)} problems in the settings:{lines}")
