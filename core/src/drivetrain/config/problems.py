"""How faults of a configuration are worded: where, which key, what is wrong, all of them at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from drivetrain.config.values import Origin
from drivetrain.errors import ConfigError

__all__ = ["did_you_mean", "fail", "listed", "problem"]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the choice closest to ``word``; empty if none is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def problem(origin: Origin, key: str, text: str) -> str:
    """One line: ``config.yaml:3:18: mixed_precision: expected ...``."""
    return ": ".join(part for part in (origin.where, key, text) if part)


def listed(problems: Sequence[str]) -> ConfigError:
    """One error that lists every problem, those of a file from top to bottom."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    lines = "".join(f"\n  {line}" for line in sorted(problems, key=_position))
    return ConfigError(f"{len(problems)} problems in the settings:{lines}")


def _position(problem: str) -> tuple[bool, str, int, int]:
    """File, line and column that a problem begins with. What stands in no file comes last."""
    found = re.match(r"(.+?):(\d+):(\d+): ", problem)
    return (False, found[1], int(found[2]), int(found[3])) if found else (True, "", 0, 0)


def fail(problems: Sequence[str]) -> NoReturn:
    """Raise one error that lists every problem.

    Raises:
        ConfigError: Always.
    """
    raise listed(problems)
