"""Values to instances of attrs classes: checks every type, and reports all that is wrong, each at its position.

Types understood in fields: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Any``, ``Literal``, ``Enum``, ``Path``,
unions, lists, tuples, sets, dicts and nested attrs classes. Any other type can only be given in code, as an instance.
"""

from __future__ import annotations

import collections.abc
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from drivetrain.config.problems import did_you_mean, fail, problem
from drivetrain.config.scalars import INVALID, READERS, MismatchError, name_of, read_literal, read_object
from drivetrain.config.values import Table, Value, from_python, plain, read_scalar
from drivetrain.errors import PluginError, add_note

__all__ = ["collect", "structure"]

T = TypeVar("T")

_SEQUENCES: dict[Any, type] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    collections.abc.Set: frozenset,
    collections.abc.MutableSequence: list,
}
_MAPPINGS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})


def structure(value: Value, cls: type[T], key: str) -> T:
    """Build an instance of an attrs class.

    Args:
        value: A table whose keys are fields of ``cls``; an empty value means all defaults.
        cls: The attrs class. ``accepts`` in a field's metadata replaces its annotation as the type to be written.
        key: The table's own key, for messages; empty for the top.

    Raises:
        ConfigError: With one line for every problem.
        PluginError: ``cls`` is no attrs class, or its annotations can't be resolved.
    """
    problems: list[str] = []
    result = collect(value, cls, key, problems)
    if problems:
        fail(problems)
    return typing.cast("T", result)


def collect(value: Value, cls: type, key: str, problems: list[str]) -> Any:
    """As ``structure``, with what is wrong added to ``problems``; no instance comes back then."""
    if not attrs.has(cls):
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}, the class of section {key!r}, is no attrs class")
    return _convert(value, cls, key, problems)


def _convert(value: Value, kind: Any, key: str, problems: list[str]) -> Any:
    """``value`` as an object of type ``kind``; INVALID once something was added to ``problems``."""
    before = len(problems)
    try:
        result = _dispatch(value, kind, key, problems)
    except MismatchError as error:
        problems.append(problem(value.origin, key, str(error)))
    return result if len(problems) == before else INVALID


def _dispatch(value: Value, kind: Any, key: str, problems: list[str]) -> Any:
    kind = getattr(kind, "__value__", kind)  # type X = ...
    kind = getattr(kind, "__supertype__", kind)  # NewType
    container = typing.get_origin(kind) or kind
    if kind is Any or kind is object:
        return plain(value)
    if container is typing.Union or container is types.UnionType:
        return _union(value, kind, key, problems)
    if container is typing.Literal:
        return read_literal(value, typing.get_args(kind))
    if kind in READERS:
        return READERS[kind](value)
    if attrs.has(container):
        return _instance(value, container, key, problems)
    if container in _SEQUENCES:
        return _sequence(value, kind, container, key, problems)
    if container in _MAPPINGS:
        return _mapping(value, kind, key, problems)
    return read_object(value, kind)


def _union(value: Value, kind: Any, key: str, problems: list[str]) -> Any:
    members = typing.get_args(kind)
    if value.content is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if value.from_shell:
        # Typed in a shell, everything could be a str. It is one only if it is nothing else.
        members = tuple(sorted(members, key=lambda member: member is str))
    failures: list[tuple[Any, list[str]]] = []
    for member in members:
        found: list[str] = []
        result = _convert(value, member, key, found)
        if not found:
            return result
        failures.append((member, found))
    fitting = [found for member, found in failures if len(failures) == 1 or _same_shape(value, member)]
    if len(fitting) != 1:
        raise MismatchError(f"expected {name_of(kind)}, got {name_of(value)}")
    problems.extend(fitting[0])
    return INVALID


def _same_shape(value: Value, kind: Any) -> bool:
    """Whether the collection that was written is of the kind of collection that the type is."""
    container = typing.get_origin(kind) or kind
    if value.is_table:
        return attrs.has(container) or container in _MAPPINGS
    return isinstance(value.content, list) and container in _SEQUENCES


def _sequence(value: Value, kind: Any, container: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(value.content, (list, tuple, set, frozenset)):
        raise MismatchError(f"expected a list, such as [a, b], got {name_of(value)}")
    items = [item if isinstance(item, Value) else from_python(item, value.origin) for item in value.content]
    arguments = typing.get_args(kind)
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise MismatchError(f"expected a list of {len(arguments)}, got {len(items)}")
        kinds = list(arguments)
    else:
        kinds = [arguments[0] if arguments else Any] * len(items)
    read = [
        _convert(item, each, f"{key}[{index}]", problems)
        for index, (item, each) in enumerate(zip(items, kinds, strict=True))
    ]
    try:
        return _SEQUENCES[container](read)
    except TypeError:  # a set of what can't be in a set
        raise MismatchError("the items of this list must be scalars") from None


def _mapping(value: Value, kind: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(value.content, Mapping):
        raise MismatchError(f"expected a mapping, such as {{key: value}}, got {name_of(value)}")
    key_kind, item_kind = typing.get_args(kind) or (Any, Any)
    result: dict[Any, Any] = {}
    for name, item in value.content.items():
        entry = item if isinstance(item, Value) else from_python(item, value.origin)
        result[_key(name, entry, key_kind, key, problems)] = _convert(entry, item_kind, f"{key}.{name}", problems)
    return result


def _key(name: Any, entry: Value, kind: Any, key: str, problems: list[str]) -> Any:
    if kind is str or kind is Any or not isinstance(name, str):
        return name
    return _convert(Value(read_scalar(name), entry.where_key, name), kind, f"{key} (its key {name!r})", problems)


def _instance(value: Value, cls: Any, key: str, problems: list[str]) -> Any:
    if isinstance(value.content, cls):
        return value.content
    if value.content is not None and not value.is_table:
        raise MismatchError(f"expected a mapping with keys of {cls.__name__}, got {name_of(value)}")
    table: Table = value.content or Table()
    fields = {field.alias or field.name: field for field in attrs.fields(cls) if field.init}
    hints = _hints(cls)
    arguments: dict[str, Any] = {}
    before = len(problems)
    for name, item in table.items():
        path = f"{key}.{name}" if key else name
        if name not in fields:
            known = did_you_mean(name, fields) or f"; known: {', '.join(fields) or 'none, it has no settings'}"
            problems.append(problem(item.where_key, path, f"unknown key{known}"))
            continue
        field = fields[name]
        kind = field.metadata.get("accepts", hints.get(field.name, Any))
        arguments[name] = read = _convert(item, kind, path, problems)
        if read is not INVALID:
            _validate(field, read, item, path, problems)
        for lower in item.history():  # what a value of higher precedence hides must be right as well
            _convert(lower, kind, path, problems)
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in table:
            problems.append(problem(value.origin, key, f"the key {name!r} is missing"))
    return _construct(cls, arguments, value, key, problems) if len(problems) == before else INVALID


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise PluginError(
            f"the annotations of {cls.__module__}.{cls.__qualname__} can't be resolved: {error}. Import the type where "
            "the class is defined, outside of TYPE_CHECKING, or give metadata={'accepts': type}"
        ) from error


def _validate(field: attrs.Attribute[Any], read: Any, item: Value, path: str, problems: list[str]) -> None:
    """What a field's own validator refuses: said also where something else keeps the class from being made."""
    if field.validator is None or not (field.converter is None or callable(field.converter)):
        return
    try:
        field.validator(None, field, read if field.converter is None else field.converter(read))
    except (ValueError, TypeError) as error:
        problems.append(problem(item.origin, path, _without_name(field.alias or field.name, _text(error))))
    except Exception:  # it looks at other fields too, or is broken: met again, and reported, when the class is made
        return


def _construct(cls: Any, arguments: dict[str, Any], value: Value, key: str, problems: list[str]) -> Any:
    """Call the class; what its validators refuse is reported at the key that is to blame, one after the other."""
    arguments = dict(arguments)
    while True:
        try:
            return _call(cls, arguments, value, key)
        except (ValueError, TypeError) as error:
            text = _text(error)
        blamed = _blame(cls, arguments, value, key, text)
        origin = value.content[blamed].origin if blamed is not None else value.origin
        path = ".".join(part for part in (key, blamed) if part)
        problems.append(problem(origin, path, _without_name(blamed or "", text)))
        if blamed is None or _mandatory(cls, blamed):
            return INVALID
        del arguments[blamed]


def _call(cls: Any, arguments: dict[str, Any], value: Value, key: str) -> Any:
    try:
        return cls(**arguments)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        add_note(error, f"while building {cls.__module__}.{cls.__qualname__} from {value.origin.where}: {key}")
        raise


def _blame(cls: Any, arguments: dict[str, Any], value: Value, key: str, text: str) -> str | None:
    """The key without which the class would not raise the same again; those that the message names are tried first."""

    def position(name: str) -> int:
        found = re.search(rf"\b{re.escape(name)}\b", text)
        return found.start() if found else len(text)

    for name in sorted(arguments, key=position):
        if _mandatory(cls, name):
            if position(name) < len(text):
                return name
            continue
        try:
            _call(cls, {other: given for other, given in arguments.items() if other != name}, value, key)
        except (ValueError, TypeError) as error:
            if _text(error) == text:
                continue
        return name
    return None


def _mandatory(cls: Any, name: str) -> bool:
    return any((field.alias or field.name) == name and field.default is attrs.NOTHING for field in attrs.fields(cls))


def _without_name(name: str, text: str) -> str:
    """A validator's text, which begins with the field's name, for behind the key."""
    return re.sub(rf"^'?{re.escape(name)}'? (?=must|should)", "", text)


def _text(error: Exception) -> str:
    """The message alone: attrs' own validators add the attribute and the value as further arguments."""
    return str(error.args[0]) if error.args else type(error).__name__
