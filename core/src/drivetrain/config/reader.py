"""YAML text to values with line and column. Only the syntax is YAML's; what scalars mean is decided here.

The document is composed into nodes and never constructed: no tag can make an object, no alias can grow without bound.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import attrs
import yaml

from drivetrain.config.problems import fail, problem
from drivetrain.config.values import Origin, Table, Value, read_scalar
from drivetrain.errors import ConfigError

__all__ = ["parse", "read_file"]

_MAX_BYTES = 1 << 18
_MAX_NODES = 20_000
_PLAIN = "plain"
_QUOTED = "quoted"
_STRING = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """Tags scalars by how they were written instead of guessing their type."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _QUOTED
        return str(super().resolve(kind, value, implicit))


@attrs.define
class _Walk:
    """Turns nodes into values, and collects what is wrong with them."""

    origin: Callable[[yaml.Mark], Origin]
    problems: list[str] = attrs.field(factory=list)
    count: int = 0
    open: list[yaml.Node] = attrs.field(factory=list)

    def value(self, node: yaml.Node, key: str, key_origin: Origin | None = None) -> Value:
        origin = self.origin(node.start_mark)
        self.count += 1
        if self.count > _MAX_NODES:
            fail([problem(origin, key, f"more than {_MAX_NODES} values, counting what aliases repeat")])
        if any(node is parent for parent in self.open):
            fail([problem(origin, key, "an alias to a collection that contains it")])
        self.open.append(node)
        content, text = self._content(node, key, origin)
        self.open.pop()
        return Value(content, origin, text, key_origin)

    def _content(self, node: yaml.Node, key: str, origin: Origin) -> tuple[Any, str | None]:
        if isinstance(node, yaml.ScalarNode) and node.tag in (_PLAIN, _QUOTED, _STRING):
            text = str(node.value)
            return (read_scalar(text), text) if node.tag == _PLAIN else (text, None)
        if isinstance(node, yaml.SequenceNode) and node.tag == yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG:
            return [self.value(item, f"{key}[{index}]") for index, item in enumerate(node.value)], None
        if isinstance(node, yaml.MappingNode) and node.tag == yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG:
            return self._table(node, key), None
        tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
        self.problems.append(problem(origin, key, f"the tag {tag} is not understood here; leave it out"))
        return None, None

    def _table(self, node: yaml.MappingNode, key: str) -> Table:
        table = Table()
        for name_node, node_of_value in node.value:
            origin = self.origin(name_node.start_mark)
            if not isinstance(name_node, yaml.ScalarNode):
                self.problems.append(problem(origin, key, "a key must be a word, not a list or a mapping"))
                continue
            name = str(name_node.value)
            path = f"{key}.{name}" if key else name
            if name == "<<" and name_node.tag == _PLAIN:
                self.problems.append(problem(origin, key, "merge keys (<<) are not supported; write the keys out"))
            elif name in table:
                first = table[name].where_key
                self.problems.append(problem(origin, path, f"given twice (first in line {first.line})"))
            else:
                table[name] = self.value(node_of_value, path, origin)
        return table


def parse(text: str, origin: Callable[[yaml.Mark], Origin]) -> Value | None:
    """Read one YAML document; None if it is empty.

    Args:
        text: The document.
        origin: Makes the origin of a value from its position.

    Raises:
        ConfigError: It is no YAML, or uses parts of YAML that settings must not.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None
        walk = _Walk(origin)
        value = walk.value(node, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = origin(mark) if mark is not None else origin(yaml.Mark("", 0, 0, 0, None, 0))
        fail([problem(where, "", _syntax(error))])
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        mark = yaml.Mark("", 0, before.count("\n"), len(before) - before.rfind("\n") - 1, None, 0)
        fail([problem(origin(mark), "", f"the character {chr(error.character)!r} is not allowed in YAML")])
    except RecursionError:
        raise ConfigError(f"{origin(yaml.Mark('', 0, 0, 0, None, 0)).name}: nested too deeply") from None
    if walk.problems:
        fail(walk.problems)
    return value


def _syntax(error: yaml.MarkedYAMLError) -> str:
    text = str(error.problem or error.context or "not valid YAML")
    if "'\\t'" in text:
        return "a tab; YAML is indented with spaces"
    if "expected a single document" in str(error.context):
        return "a second document begins here; settings are a single one"
    if "mapping values are not allowed here" in text:
        return "a colon is not allowed here; check the indentation, and quote texts that contain ': '"
    return f"{error.context}: {text}" if error.context and error.problem else text


def read_file(path: str, hint: str = "") -> Value:
    """Read a file of settings.

    Args:
        path: The file, in YAML or JSON.
        hint: Follows the path in messages about the file itself, to say who named it.

    Raises:
        ConfigError: The file can't be read, is no UTF-8, no YAML, or no mapping.
    """
    text = _read_text(path, hint)
    if path.endswith(".json"):
        # JSON may be indented with tabs, and has none inside of strings: as spaces they keep every column.
        text = text.replace("\t", " ")

    def origin(mark: yaml.Mark) -> Origin:
        return Origin("file", path, mark.line + 1, mark.column + 1)

    top = parse(text, origin)
    if top is None or top.text == "":  # nothing, or nothing after "---"
        return Value(Table(), Origin("file", path))
    if not top.is_table:
        fail([problem(top.origin, "", "expected settings as 'key: value' lines, got something else")])
    return top


def _read_text(path: str, hint: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except ValueError as error:  # a null character in the name
        raise ConfigError(f"config file {path!r}{hint} can't be read: {error}") from error
    except OSError as error:
        reason = {errno.ENOENT: "does not exist", errno.EISDIR: "is a directory, not a file"}.get(error.errno or 0)
        raise ConfigError(f"config file {path}{hint} {reason or f'can not be read: {error.strerror}'}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"config file {path}{hint} is larger than {_MAX_BYTES} bytes; it can't be a file of settings")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        where = Origin("file", path, before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise ConfigError(
            problem(where, "", f"not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8")
        ) from error
