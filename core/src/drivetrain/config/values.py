"""A value together with where it came from, and how values of several sources are laid over each other.

Types are decided later, by the attrs class a value ends up in (:mod:`drivetrain.config.structure`). Until then a value
keeps the characters the user wrote: only the class knows whether ``no`` is a word or the opposite of yes.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

__all__ = ["Origin", "Table", "Value", "display", "from_python", "insert", "leaves", "merge", "plain", "read_scalar"]

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {
    spelling: value
    for word, value in {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.items()
    for spelling in (word, word.capitalize(), word.upper())
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_HEXADECIMAL = re.compile(r"[-+]?0x[0-9a-fA-F][0-9a-fA-F_]*")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_LONGEST_NUMBER = 100


@attrs.frozen
class Origin:
    """Where a value was given. ``str()`` is for logs; ``where`` is for errors and has the column too."""

    source: Literal["default", "file", "environment", "command line", "code"]
    name: str = ""
    """Path of the file, or name of the environment variable."""
    line: int | None = None
    """Line in the file, counted from 1."""
    column: int | None = None
    """Column in the file, counted from 1."""

    def __str__(self) -> str:
        return self._text(self.line)

    @property
    def where(self) -> str:
        """Like ``str()``, with the column: ``config.yaml:3:18``."""
        return self._text(self.line, self.column)

    @property
    def in_code(self) -> bool:
        """Whether it was an argument in the program."""
        return self.source == "code"

    def _text(self, *position: int | None) -> str:
        if self.source == "file":
            return ":".join([self.name, *(str(number) for number in position if number is not None)])
        if self.source == "environment":
            return f"environment {self.name}"
        return "Accelerator(...)" if self.source == "code" else self.source


class Table(dict[str, "Value"]):
    """Values by key. A plain dict is no table, but an object somebody gave in code, with keys of any kind."""


@attrs.frozen
class Value:
    """What somebody gave for a key, not yet checked against a type."""

    content: Any
    """A scalar, a Table, a list of Values, or any object given in code."""
    origin: Origin
    text: str | None = None
    """The characters of an unquoted scalar, or of a list typed in a shell. None if it was quoted or given in code."""
    key_origin: Origin | None = None
    """Where its key stands, for messages about the key itself."""
    shadowed: Value | None = None
    """The value of lower precedence that this one replaced."""

    @property
    def is_table(self) -> bool:
        """Whether this is a mapping with keys of its own."""
        return isinstance(self.content, Table)

    @property
    def from_shell(self) -> bool:
        """Whether it was typed where everything is text, so that a number can stand for a word."""
        return self.text is not None and self.origin.source in ("environment", "command line")

    @property
    def where_key(self) -> Origin:
        """Position of the key, or of the value if it has none."""
        return self.key_origin or self.origin

    def history(self) -> Iterator[Value]:
        """The values this one replaced, the nearest first."""
        lower = self.shadowed
        while lower is not None:
            yield lower
            lower = lower.shadowed

    def get(self, path: tuple[str, ...]) -> Value | None:
        """The value at a path of keys, or None."""
        found: Value | None = self
        for key in path:
            found = found.content.get(key) if found is not None and found.is_table else None
        return found


def read_scalar(text: str) -> Any:
    """Read an unquoted scalar: null, a boolean, a whole number, a float, else the text itself.

    Booleans are YAML 1.1's (``no`` is one), floats YAML 1.2's (``1e-5`` is one). What YAML 1.1 reads in surprising
    ways, ``010`` as octal 8 and ``1:30`` as 90, stays text here, so that nobody gets a number they did not write.
    """
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEXADECIMAL.fullmatch(text):
        return int(text.replace("_", ""), 16)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if special := _SPECIAL_FLOAT.fullmatch(text):
        return float(special[1] + special[2])
    return text


def from_python(content: Any, origin: Origin) -> Value:
    """Wrap an object given in code. Mappings with text keys become tables; everything else stays what it is."""
    if isinstance(content, Mapping) and all(isinstance(key, str) for key in content):
        return Value(Table({key: from_python(item, origin) for key, item in content.items()}), origin)
    return Value(content, origin)


def insert(table: Value, path: tuple[str, ...], value: Value) -> Value:
    """``table`` with ``value`` laid over what stands at ``path``."""
    for key in reversed(path):
        value = Value(Table({key: value}), value.origin)
    return merge(table, value)


def merge(lower: Value, upper: Value) -> Value:
    """``upper`` over ``lower``: tables are merged by key; anything else replaces what was there and remembers it."""
    if not (lower.is_table and upper.is_table):
        return attrs.evolve(upper, shadowed=lower)
    content = Table(lower.content)
    for key, value in upper.content.items():
        content[key] = merge(content[key], value) if key in content else value
    return attrs.evolve(lower, content=content)


def leaves(value: Value, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Every value that is no table, with its path. An empty table counts as a leaf."""
    if value.is_table and (value.content or not path):
        for key, item in value.content.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def plain(value: Value) -> Any:
    """The bare Python data: lists, dicts and scalars without origins."""
    content = value.content
    if isinstance(content, Table):
        return {key: plain(item) for key, item in content.items()}
    if isinstance(content, list):
        return [plain(item) if isinstance(item, Value) else item for item in content]
    return content


def display(value: Any) -> str:
    """A value as one would write it in the file, on one line."""
    if isinstance(value, Value):
        return value.text or display(value.content)
    if attrs.has(type(value)):
        return display(attrs.asdict(value, recurse=False))
    if isinstance(value, enum.Enum):
        return display(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {display(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(display(item) for item in value) + "]"
    return (value or '""') if isinstance(value, str) else repr(value)
