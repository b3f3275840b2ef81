"""Configuration files of Accelerate's: recognised, and translated key by key.

The tables below know the keys that concern core. How the settings of a plugin are written there is declared by the
plugin (:class:`drivetrain.plugin.Migration`), so that core names none, and a plugin of a third party takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs

from drivetrain.config.layers import from_arguments
from drivetrain.config.problems import fail, problem
from drivetrain.config.values import Origin, Value, display, plain
from drivetrain.discovery import CORE
from drivetrain.errors import ConfigError
from drivetrain.plugin import Migration

__all__ = ["Line", "Translation", "looks_foreign", "meaning", "refuse_foreign", "translate"]

_TYPE = "distributed_type"
_MARKS = ("compute_environment", _TYPE)
"""Keys that every such file has, and no file of ours."""

_COMMON_TYPES: Mapping[str, Mapping[str, Any]] = {
    "no": {"num_processes": 1},
    "multi_cpu": {"device": "cpu"},
    "multi_*": {},
}
"""Values of ``distributed_type`` that stand for no particular backend."""

_TOP = Migration(
    section="",
    keys={
        "compute_environment": {"local_machine": {}},
        _TYPE: _COMMON_TYPES,
        "mixed_precision": lambda text: {"mixed_precision": text.lower()},
        "fp16": {"true": {"mixed_precision": "fp16"}, "false": {}},
        "use_cpu": {"true": {"device": "cpu"}, "false": {}},
        "num_processes": {"-1": {}, "*": "num_processes"},
        "num_machines": "num_machines",
        "machine_rank": "machine_rank",
        "main_process_ip": "main_process_ip",
        "main_process_port": "main_process_port",
        "gpu_ids": "gpu_ids",
        "rdzv_backend": "rdzv_backend",
        "rdzv_conf": "rdzv_conf",
        "same_network": {"*": {}},
        "main_training_function": {"main": {}},
        "enable_cpu_affinity": {"false": {}},
        "downcast_bf16": {"no": {}, "false": {}},
        "debug": {"true": {"check_collectives": True}, "false": {}},
        "dynamo_backend": {"no": {}, "*": lambda text: {"compile.backend": text.lower()}},
    },
    notes={
        "compute_environment": "only machines one is on are launched on; a cloud service runs the script as it is",
        _TYPE: "several processes get the installed default backend",
        "num_processes": "one for each device of the machine is the default",
        "same_network": "machines meet at main_process_ip wherever they are",
        "main_training_function": "the script is run as a whole; notebook_launcher takes a function",
        "enable_cpu_affinity": "bind the processes with numactl, or with the options of the job scheduler",
        "downcast_bf16": "mixed_precision: bf16 computes in that format and keeps the weights as they are",
        "debug": "collectives are compared over ranks unless check_collectives: false says otherwise",
        "command_file": "start `drivetrain launch` on every machine",
        "commands": "start `drivetrain launch` on every machine",
    },
)
_NOT_COMPILED = Migration(
    section="dynamo_config", keys={"*": {"*": {}}}, where={"dynamo_config.dynamo_backend": ("no", "")}
)
_COMPILED = Migration(
    section="dynamo_config",
    keys={
        "dynamo_backend": lambda text: {"compile.backend": text.lower()},
        "dynamo_mode": "compile.mode",
        "dynamo_use_dynamic": "compile.dynamic",
        "dynamo_use_fullgraph": "compile.fullgraph",
        "dynamo_use_regional_compilation": {"false": {}},
    },
    notes={"dynamo_use_regional_compilation": "call block.compile() for each block of the model in the script"},
)
_STARTED_BY_OTHERS = Migration(
    section="mpirun_config",
    keys={},
    notes={"*": "start the script with mpirun itself: `mpirun -n 4 python train.py` is understood as it is"},
)
_SECTIONS = (_NOT_COMPILED, _COMPILED, _STARTED_BY_OTHERS)


@attrs.frozen(kw_only=True)
class Line:
    """What becomes of one key of the file."""

    origin: Origin
    key: str
    text: str
    """For people: what it is here, or why it is nothing."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """By key in full; texts are read like scalars of the file."""
    translated: bool = True
    """False: something was asked for there that is not in the translation."""

    def __str__(self) -> str:
        return problem(self.origin, self.key, self.text)


@attrs.frozen
class Translation:
    """A line for every key of the file."""

    lines: tuple[Line, ...]

    @property
    def layer(self) -> Value:
        """The settings."""
        merged: dict[str, Any] = {}
        for line in self.lines:
            for key, value in line.settings.items():
                # What a key says outright wins over what follows from another one.
                if key not in merged or key == line.key:
                    merged[key] = value
        return from_arguments(merged, Origin("command line"))

    @property
    def missing(self) -> list[Line]:
        """Lines of what was not translated."""
        return [line for line in self.lines if not line.translated]

    @property
    def summary(self) -> str:
        """How many keys are taken care of: ``18 of 20 keys are taken care of (10 the same, ...)``."""
        same = sum(list(line.settings) == [line.key] for line in self.lines)
        set_here = sum(bool(line.settings) for line in self.lines)
        fine = len(self.lines) - len(self.missing)
        counts = {"the same": same, "in other words": set_here - same, "with nothing to set": fine - set_here}
        how = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return f"{fine} of {len(self.lines)} keys are taken care of" + (f" ({how})" if how else "")


def looks_foreign(file: Value) -> bool:
    """Whether this is a configuration file of Accelerate's."""
    return file.is_table and any(key in file.content for key in _MARKS)


def meaning(key: str, value: Value) -> str | None:
    """What a single key of Accelerate's is here; None if there is none of this name at the top of its files."""
    return _line(_TOP, key, key, value).text if key in _TOP.keys else None


def refuse_foreign(path: str, file: Value) -> None:
    """Say how to have the file translated, and what of it can't be.

    Raises:
        ConfigError: It is a file of Accelerate's.
    """
    if not looks_foreign(file):
        return
    translation = translate(file)
    missing = "".join(f"\n  {line}" for line in translation.missing)
    raise ConfigError(
        f"{path} is a configuration file of Accelerate's; to have it translated: "
        f"{CORE} config migrate {path} --output NEW.yaml\n  {translation.summary}{missing}"
    )


def translate(file: Value) -> Translation:
    """What every key of such a file is here. Imports the light classes of the installed plugins.

    Raises:
        ConfigError: It is no file of Accelerate's.
    """
    if not looks_foreign(file):
        fail([problem(file.origin, "", f"no configuration file of Accelerate's, which has a {_TYPE}; nothing to do")])
    return Translation(tuple(_lines(file)))


def _lines(file: Value) -> Iterator[Line]:
    tables = (*_SECTIONS, *_tables_of_plugins())
    for key, value in file.content.items():
        if key == _TYPE:
            yield _distribution(value, file)
        elif value.is_table or any(table.section == key for table in tables):
            yield from _section(key, value, file, tables)
        else:
            yield _line(_TOP, key, key, value)


# ------------------------------------------------------------------------------------------------------------ one key


def _line(table: Migration, name: str, key: str, value: Value) -> Line:
    """What the table says of a key.

    Args:
        table: Of its section.
        name: In that section.
        key: In full.
        value: What it was given.
    """
    target: Any = table.keys.get(name, table.keys.get("*"))
    note = table.notes.get(name, table.notes.get("*", ""))
    if isinstance(target, Mapping) and target:
        target = next((found for pattern, found in target.items() if _matches(value, pattern)), None)
    if value.content is None or (not target and _is_off(value)):
        return _made(key, value, "not used there, nothing to set")
    if target is None:
        why = note or "there is no such setting here"
        return _made(key, value, f"{display(value)}: NOT TRANSLATED: {why}", translated=False)
    if isinstance(target, str):
        settings = {target: plain(value) if value.text is None else value.text}
    else:
        settings = dict(target(display(value)) if callable(target) else target)
    if list(settings) == [key]:
        return _made(key, value, "the same", settings)
    return _made(key, value, _written(settings) or f"nothing to set{': ' if note else ''}{note}", settings)


def _made(
    key: str, value: Value, text: str, settings: Mapping[str, Any] | None = None, *, translated: bool = True
) -> Line:
    return Line(origin=value.where_key, key=key, text=text, settings=settings or {}, translated=translated)


def _matches(value: Value | None, pattern: str) -> bool:
    if value is None or value.content is None:
        return pattern == ""
    spellings = {display(value).lower()}
    if isinstance(value.content, bool):
        spellings.add(str(value.content).lower())
    return any(fnmatchcase(spelling, pattern) for spelling in spellings)


def _is_off(value: Value) -> bool:
    """Whether a key that nobody knows asks for nothing."""
    return not value.content or str(value.content).lower() in ("no", "none", "false")


def _written(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {display(item)}" for key, item in settings.items())


# --------------------------------------------------------------------------------------------------- backends, sections


def _distribution(value: Value, file: Value) -> Line:
    """The key that says how the model is distributed: the backend whose plugin calls it so."""
    if any(_matches(value, pattern) for pattern in _COMMON_TYPES):
        return _line(_TOP, _TYPE, _TYPE, value)
    found = _backends(value, file)
    if len(found) == 1:
        return _made(_TYPE, value, f"backend: {found[0]}", {"backend": found[0]})
    if found:
        why = f"several installed backends are of this kind, choose one: {', '.join(found)}"
    else:
        why = f"no installed backend is of this kind{_to_be_had(display(value))}"
    return _made(_TYPE, value, f"{display(value)}: NOT TRANSLATED: {why}", translated=False)


def _backends(value: Value, file: Value) -> list[str]:
    """Installed backends that a ``distributed_type`` stands for: by their tables, else by what they report."""
    from drivetrain import registry

    meant = [
        name
        for name, found in registry.describe_all("backend").items()
        if found.migration is not None and _TYPE in found.migration.where and _holds(found.migration, file)
    ]
    without = {name: found for name, found in registry.load_all("backend")[0].items() if found.migration is None}
    return meant or [
        name
        for name in without
        if registry.create(registry.find("backend", name)).capabilities.distributed_type.lower()
        == display(value).lower()
    ]


def _tables_of_plugins() -> list[Migration]:
    from drivetrain import registry

    # Without their engines: a file may be translated on another machine than the one it is for.
    described = [found for role in registry.GROUPS for found in registry.describe_all(role).values()]
    return [found.migration for found in described if found.migration is not None]


def _section(key: str, value: Value, file: Value, tables: tuple[Migration, ...]) -> Iterator[Line]:
    """Lines for the keys in a section, by the first table of it whose conditions hold."""
    about = [table for table in tables if table.section == key]
    table = next((table for table in about if _holds(table, file)), None)
    if not value.content:
        yield _made(key, value, "not used there, nothing to set")
    elif table is not None and value.is_table:
        yield from (_line(table, name, f"{key}.{name}", item) for name, item in value.content.items())
    elif about:
        yield _made(key, value, f"nothing to set: it counts there only with {_conditions(about)}")
    else:
        why = f"no installed plugin reads it{_to_be_had(key)}"
        yield _made(key, value, f"{display(value)}: NOT TRANSLATED: {why}", translated=False)


def _holds(table: Migration, file: Value) -> bool:
    return all(
        any(_matches(file.get(tuple(key.split("."))), pattern) for pattern in patterns)
        for key, patterns in table.where.items()
    )


def _conditions(tables: list[Migration]) -> str:
    """What would have to be so for a section to count."""
    return "; or ".join(
        ", ".join(f"{key}: {' or '.join(filter(None, patterns))}" for key, patterns in table.where.items())
        for table in tables
    )


def _to_be_had(text: str) -> str:
    """The extra that brings what a foreign name seems to mean."""
    from drivetrain import registry
    from drivetrain.discovery import extra_roles

    for extra, role in extra_roles().items():
        if extra in text.lower().split("_") and extra not in registry.entries()[role]:
            return f'; pip install "{CORE}[{extra}]", then translate again'
    return ""
