"""Environment variables as settings of a program: reading them, and changing them for a while in its own process.

The library itself never writes ``os.environ``; these are for programs that want to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]

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


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of an environment variable; ``default`` if it is not set."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The whole number in the first of several environment variables that is set and not below 0.

    Raises:
        ValueError: One that is asked holds no whole number.
    """
    for key in env_keys:
        text = os.environ.get(key)
        if text is None:
            continue
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"the environment variable {key} should be a whole number, and is {text!r}") from None
        if number >= 0:
            return number
    return default


def convert_dict_to_env_variables(current_env: Mapping[str, object]) -> list[str]:
    """Lines ``KEY=VALUE`` for a file of environment variables.

    Raises:
        ValueError: A name is empty or has ``=`` in it, or a name or value a line break: such a line means another one.
    """
    lines = []
    for key, value in current_env.items():
        if not key or "=" in key or any(mark in f"{key}{value}" for mark in "\n\r\0"):
            raise ValueError(f"{key!r}: {value!r} can't be written as a line KEY=VALUE")
        lines.append(f"{key}={value}\n")
    return lines


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
