"""Environment variables as settings of a program: reading them, and changing them for a while in its own process.

The library itself never writes ``os.environ``; these are for programs that want to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["clear_environment", "parse_flag_from_env", "patch_environment", "str_to_bool"]

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def str_to_bool(value: str) -> int:
    """1 for a word that means yes, 0 for one that means no, whatever its case.

    Raises:
        ValueError: It means neither.
    """
    word = value.lower()
    if word in _TRUE:
        return 1
    if word in _FALSE:
        return 0
    raise ValueError(f"{value!r} means neither yes nor no; use one of {', '.join(sorted(_TRUE | _FALSE))}")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether an environment variable says yes; ``default`` if it is not set.

    Raises:
        ValueError: It is set to something that means neither yes nor no.
    """
    value = os.environ.get(key)
    return default if value is None else bool(str_to_bool(value))


@contextlib.contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Context with other environment variables: ``with patch_environment(omp_num_threads=1)``.

    Names are written in upper case. What was there before is put back, also after an exception.

    Args:
        **variables: Values, as text.
    """
    before = {name.upper(): os.environ.get(name.upper()) for name in variables}
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Context without any environment variable. What was there before is put back, and nothing else stays."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
