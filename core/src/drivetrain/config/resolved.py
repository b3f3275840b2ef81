"""The outcome of resolving: the core's settings, the sections of plugins, and where every value came from."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import attrs

from drivetrain.config.problems import fail, problem
from drivetrain.config.schema import RunConfig, field_names
from drivetrain.config.structure import collect, structure
from drivetrain.config.values import Origin, Table, Value, display, from_python, insert, leaves, merge, plain
from drivetrain.errors import ConfigError

__all__ = ["Override", "Resolved", "Row", "load_layers", "load_resolved"]

T = TypeVar("T")

_FORMAT = 1
_DEFAULT = Origin("default")


class Override(NamedTuple):
    """A value that was given and did not count, since one of higher precedence was given as well."""

    key: str
    value: str
    origin: Origin
    shadowed: str
    shadowed_origin: Origin


class Row(NamedTuple):
    """One setting, its value and where that came from."""

    key: str
    value: Any
    """Plain Python data."""
    text: str
    """The value as one would write it."""
    origin: Origin


def _merged(resolved: Resolved) -> Value:
    return functools.reduce(merge, resolved.layers, Value(Table(), _DEFAULT))


@attrs.frozen(kw_only=True, eq=False)
class Resolved:
    """Settings from all sources, merged.

    Raises:
        ConfigError: A core setting is unknown, of the wrong type or impossible; one line for each.
    """

    layers: tuple[Value, ...] = attrs.field(repr=False)
    """What each source gave, in ascending order of precedence."""
    config_file: str | None = None
    """Path of the file that was read."""
    _table: Value = attrs.field(init=False, repr=False, default=attrs.Factory(_merged, takes_self=True))
    run: RunConfig = attrs.field(init=False)
    """The core's own settings."""
    _built: dict[tuple[str, type], Any] = attrs.field(init=False, repr=False, factory=dict)

    @run.default
    def _run(self) -> RunConfig:
        core = Table({key: value for key, value in self._table.content.items() if key in field_names()})
        return structure(attrs.evolve(self._table, content=core), RunConfig, "")

    def section(self, name: str, cls: type[T]) -> T:
        """The section of a plugin as an instance of its attrs class; all defaults if it was not given.

        Args:
            name: The plugin's name, which is the section's.
            cls: The plugin's ``Config``.

        Raises:
            ConfigError: With one line for every key that is unknown or wrong.
            PluginError: ``cls`` is no attrs class, or its annotations can't be resolved.
        """
        if (name, cls) not in self._built:
            problems: list[str] = []
            section = self._collect(name, cls, problems)
            if problems:
                fail(problems)
            self._built[name, cls] = section
        return cast("T", self._built[name, cls])

    def problems(self, name: str, cls: type) -> list[str]:
        """What is wrong with the section of a plugin, a line for each key. Arguments as of :meth:`section`.

        Raises:
            PluginError: As there.
        """
        problems: list[str] = []
        self._collect(name, cls, problems)
        return problems

    def _collect(self, name: str, cls: type, problems: list[str]) -> Any:
        value = self._table.get((name,)) or Value(Table(), _DEFAULT)
        for lower in value.history():
            collect(lower, cls, name, problems)
        return collect(value, cls, name, problems)

    def sections(self) -> tuple[str, ...]:
        """Names of the sections that were given."""
        return tuple(key for key in self._table.content if key not in field_names())

    def origin(self, key: str) -> Origin:
        """Where the value of a dotted key came from; ``default`` if nobody gave it."""
        value = self._table.get(tuple(key.split(".")))
        return _DEFAULT if value is None else value.origin

    def value(self, key: str) -> Any:
        """The value of a dotted key: of a core setting, or of a section as its class made it.

        Keys of a section that was not built yet have the value that was given, None if none was.
        """
        first, *rest = key.split(".")
        if first in field_names():
            return _follow(getattr(self.run, first), rest)
        for (name, _), instance in self._built.items():
            if name == first:
                return _follow(instance, rest)
        given = self._table.get((first, *rest))
        return None if given is None else plain(given)

    def rows(self, sections: Mapping[str, Any] | None = None) -> list[Row]:
        """Every core setting in order, then every key of sections that was given.

        Args:
            sections: Instances of plugins' classes, by the section's name: of these, every key is listed.
        """
        rows: list[Row] = []
        for name in field_names():
            given = self._table.get((name,))
            value = getattr(self.run, name)
            bare = attrs.asdict(value) if attrs.has(type(value)) else value
            rows.append(Row(name, bare, display(value), _DEFAULT if given is None else _newest(given)))
        instances = sections or {}
        for name in dict.fromkeys((*self.sections(), *instances)):
            rows += _section_rows(self._table.get((name,)), instances.get(name), (name,))
        return rows

    def overridden(self) -> list[Override]:
        """Values that were given and did not count, the one of highest precedence first for each key."""
        return list(_overrides(self._table, ()))

    def describe(self, leave_out: Collection[str] = ()) -> str:
        """What was overridden, for the log: ``mixed_precision=bf16 (command line; config.yaml:3 said no)``.

        Empty if nothing was.

        Args:
            leave_out: Keys not to speak of.
        """
        said: dict[str, str] = {}
        for row in self.overridden():
            if row.key in leave_out:
                continue
            said.setdefault(row.key, f"{row.key}={row.value} ({row.origin}")
            said[row.key] += f"; {row.shadowed_origin} said {row.shadowed}"
        return ", ".join(f"{text})" for text in said.values())

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write everything for the workers, with origins: JSON, which is YAML too, one setting a line.

        Raises:
            ConfigError: A value given in code can't be written down, or the file can't.
        """
        layers = ",\n".join("[\n" + ",\n".join(_records(layer)) + "\n]" for layer in self.layers)
        head = f'{{"drivetrain_settings": {_FORMAT}, "config_file": {json.dumps(self.config_file)}, "layers": [\n'
        try:
            # Settings may hold a tracker's key: nobody else needs to read them.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(head + layers + "\n]}\n")
        except OSError as error:
            raise ConfigError(f"resolved settings can't be written to {os.fspath(path)}: {error.strerror}") from error


def _follow(thing: Any, keys: Sequence[str]) -> Any:
    """What is at a path of keys below an instance or a mapping; None if nothing is."""
    for key in keys:
        thing = thing.get(key) if isinstance(thing, Mapping) else getattr(thing, key, None)
    return thing


def _section_rows(given: Value | None, made: Any, path: tuple[str, ...]) -> Iterator[Row]:
    """Rows for a key of a section and all below it: as it was given, where nobody gave it as its class made it."""
    key = ".".join(path)
    table = given.content if given is not None and given.is_table else Table()
    known = attrs.fields(type(made)) if attrs.has(type(made)) else ()
    names = {field.alias or field.name: field.name for field in known if field.init}
    inner = dict.fromkeys((*names, *table))
    if inner and (given is None or given.is_table or given.content is None):
        for name in inner:
            yield from _section_rows(table.get(name), getattr(made, names.get(name, ""), None), (*path, name))
    elif given is not None:
        yield Row(key, plain(given), display(given), given.origin)
    elif not attrs.has(type(made)):
        yield Row(key, made, display(made), _DEFAULT)


def _newest(value: Value) -> Origin:
    """Origin of the value with the highest precedence inside of a table: ``compile`` may come from several sources."""
    order = ("default", "file", "environment", "command line", "code")
    origins = [leaf.origin for _, leaf in leaves(value)] or [value.origin]
    return max(origins, key=lambda origin: order.index(origin.source))


def _overrides(value: Value, path: tuple[str, ...]) -> Iterator[Override]:
    for lower in value.history():
        empty_section = lower.content is None and value.is_table
        if display(lower) != display(value) and not empty_section:
            yield Override(".".join(path), display(value), value.origin, display(lower), lower.origin)
    if value.is_table:
        for key, item in value.content.items():
            yield from _overrides(item, (*path, key))


def _records(layer: Value) -> Iterator[str]:
    for path, leaf in leaves(layer):
        if path:
            try:
                yield json.dumps({"key": path, **_encode(leaf)})
            except (TypeError, ValueError) as error:
                text = f"{display(leaf)} can't be handed to other processes: {error}"
                raise ConfigError(problem(leaf.origin, ".".join(path), text)) from error


def _encode(value: Value) -> dict[str, Any]:
    content = value.content
    record: dict[str, Any] = {}
    if isinstance(content, Table):
        record["table"] = {key: _encode(item) for key, item in content.items()}
    elif isinstance(content, list) and any(isinstance(item, Value) for item in content):
        record["items"] = [_encode(item) for item in content]
    else:
        record["value"] = content
    if value.text is not None:
        record["text"] = value.text
    return {**record, **{key: item for key, item in attrs.asdict(value.origin).items() if item not in (None, "")}}


def _decode(record: dict[str, Any]) -> Value:
    origin = Origin(record["source"], record.get("name", ""), record.get("line"), record.get("column"))
    if "table" in record:
        return Value(Table({key: _decode(item) for key, item in record["table"].items()}), origin)
    if "items" in record:
        return Value([_decode(item) for item in record["items"]], origin)
    text = record.get("text")
    return from_python(record["value"], origin) if text is None else Value(record["value"], origin, text)


def _decode_layer(records: Sequence[dict[str, Any]]) -> Value:
    layer = Value(Table(), _DEFAULT)
    for record in records:
        layer = insert(layer, tuple(record["key"]), _decode(record))
    return layer


def load_layers(path: str | os.PathLike[str]) -> tuple[str | None, tuple[Value, ...]]:
    """What ``Resolved.dump`` wrote: the path of the file that was read, and the layers.

    Raises:
        ConfigError: The file can't be read or is not one of ours.
    """
    cure = "DRIVETRAIN_RESOLVED names it; the launcher sets that for its processes, unset it elsewhere"
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if data["drivetrain_settings"] != _FORMAT:
            raise ConfigError(f"resolved settings {os.fspath(path)} are from another version of drivetrain. {cure}")
        return data["config_file"], tuple(_decode_layer(records) for records in data["layers"])
    except OSError as error:
        raise ConfigError(f"resolved settings {os.fspath(path)} can't be read: {error.strerror}. {cure}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{os.fspath(path)} is no file of resolved settings ({what}). {cure}") from error


def load_resolved(path: str | os.PathLike[str]) -> Resolved:
    """What a launcher resolved, with all origins, as its workers read it.

    Raises:
        ConfigError: The file can't be read or is not one of ours.
    """
    config_file, layers = load_layers(path)
    return Resolved(layers=layers, config_file=config_file)
