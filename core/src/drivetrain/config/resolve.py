"""All sources of settings, merged in their order of precedence."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from drivetrain.config.files import read_config_file
from drivetrain.config.layers import from_arguments, from_environment
from drivetrain.config.problems import fail
from drivetrain.config.resolved import Resolved, load_layers
from drivetrain.config.schema import RunConfig, field_names, world_keys
from drivetrain.config.sections import Sections, can_be_section, check_top_level, installed_sections
from drivetrain.config.structure import collect
from drivetrain.config.values import Origin, Table, Value, merge
from drivetrain.errors import ConfigError

__all__ = ["merged_layers", "resolve"]


def resolve(
    config_file: str | os.PathLike[str] | None = None,
    command_line: Mapping[str, Any] | None = None,
    code: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    sections: Callable[[], Sections] = installed_sections,
) -> Resolved:
    """Merge defaults < file < environment < command line < code.

    The file is ``config_file``, else ``$DRIVETRAIN_CONFIG``, else the default file if there is one.

    A process that a launcher started has ``DRIVETRAIN_RESOLVED``: everything below ``code`` is read from that file, as
    the launcher saw it. A ``config_file`` named in code then ranks above the launcher's file and below its environment
    and command line, and can't change the world of processes, which stands. A process with a command line of its
    own, even an empty one, is a launcher and ignores that variable.

    Args:
        config_file: A YAML or JSON file.
        command_line: Values by dotted key; strings are read like scalars of the file; None: not given.
        code: Values by dotted key, as Python objects; None: not given.
        environment: Variables; ``DRIVETRAIN_<KEY>`` and ``DRIVETRAIN_<SECTION>__<KEY>`` are read, none is written.
        sections: Answers which names can be sections. Asked only when there is a section.

    Returns:
        The core's settings, checked; sections of plugins are checked when they are built.

    Raises:
        ConfigError: A file can't be read, or settings are unknown, of the wrong type or impossible; the message has
            one line for each, with file, line and column. Plugins that are named and sections are looked at only if
            something else is wrong, so that everything wrong is told at once.
    """
    sections = functools.cache(sections)
    resolved_file = environment.get("DRIVETRAIN_RESOLVED")
    if resolved_file and command_line is None:
        path, layers = _in_worker(resolved_file, config_file)
    else:
        path, layers = _from_sources(config_file, command_line or {}, environment, sections)
    if code:
        layers = (*layers, from_arguments(code, Origin("code")))
    return merged_layers(layers, path, sections=sections)


def merged_layers(
    layers: tuple[Value, ...],
    config_file: str | None = None,
    *,
    sections: Callable[[], Sections] = installed_sections,
) -> Resolved:
    """Layers of settings, in ascending order of precedence, merged and checked.

    Args:
        layers: What each source gave.
        config_file: Path of the file that was read.
        sections: As of ``resolve``.

    Raises:
        ConfigError: As of ``resolve``.
    """
    problems: list[str] = []
    for layer in layers:
        check_top_level(layer, sections, problems)
    with contextlib.suppress(ConfigError):  # what is wrong is said below, with everything else
        resolved = Resolved(layers=layers, config_file=config_file)
        if not problems:
            return resolved
    fail([*problems, *_other_problems(layers)])


def _other_problems(layers: Sequence[Value]) -> list[str]:
    """What is wrong beside the keys at the top: core's settings, the plugins they name, and sections."""
    from drivetrain.checking import NAMING, problems_of  # loads plugins, which a run in order does later

    merged = functools.reduce(merge, layers, Value(Table(), Origin("default")))
    core = Table({key: value for key, value in merged.content.items() if key in field_names()})
    problems = _problems_in(core)
    # Settings that are right alone, and no others: those that are wrong must not hide what is wrong elsewhere.
    right = {key: value for key, value in core.items() if key in NAMING and not _problems_in(Table({key: value}))}
    right |= {key: value for key, value in merged.content.items() if key not in core and can_be_section(value)}
    return [*problems, *problems_of(Resolved(layers=(attrs.evolve(merged, content=Table(right)),)))]


def _problems_in(core: Table) -> list[str]:
    problems: list[str] = []
    collect(Value(core, Origin("default")), RunConfig, "", problems)
    return problems


def _from_sources(
    config_file: str | os.PathLike[str] | None,
    command_line: Mapping[str, Any],
    environment: Mapping[str, str],
    sections: Callable[[], Sections],
) -> tuple[str | None, tuple[Value, ...]]:
    path, file = read_config_file(config_file, environment)
    typed = from_arguments(command_line, Origin("command line"))
    return path, (file, from_environment(environment, sections), typed)


def _in_worker(resolved_file: str, config_file: str | os.PathLike[str] | None) -> tuple[str | None, tuple[Value, ...]]:
    path, (launchers_file, *above) = load_layers(resolved_file)
    if config_file is None:
        return path, (launchers_file, *above)
    path, file = read_config_file(config_file, {})
    world, rest = _split(file)
    return path, (world, launchers_file, rest, *above)


def _split(layer: Value) -> tuple[Value, Value]:
    """What a layer says about the world of processes, and the rest."""
    world = Table({key: value for key, value in layer.content.items() if key in world_keys()})
    rest = Table({key: value for key, value in layer.content.items() if key not in world_keys()})
    return attrs.evolve(layer, content=world), attrs.evolve(layer, content=rest)
