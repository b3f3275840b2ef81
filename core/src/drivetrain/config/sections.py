"""Which keys may stand at the top of a configuration: the core's own, and the names of installed plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from drivetrain.config.problems import did_you_mean, problem
from drivetrain.config.scalars import name_of
from drivetrain.config.schema import field_names
from drivetrain.config.values import Value

__all__ = ["Sections", "can_be_section", "check_top_level", "installed_sections"]


@attrs.frozen
class Sections:
    """Names that can be sections, from package metadata; no plugin is imported."""

    installed: frozenset[str]
    """Names of installed plugins of all roles."""
    extras: frozenset[str] = frozenset()
    """Extras of the core's own distribution: what can be installed by that name."""


@functools.cache
def _core_keys() -> frozenset[str]:
    return frozenset(field_names())


def installed_sections() -> Sections:
    """What is installed in this environment."""
    from drivetrain import discovery  # metadata is read only when a section is seen

    return Sections(frozenset(name for role in discovery.entries().values() for name in role), discovery.extras())


def check_top_level(layer: Value, sections: Callable[[], Sections], problems: list[str]) -> None:
    """Report keys that are no setting and no plugin, and sections that are no mappings."""
    for key, value in layer.content.items():
        if key in _core_keys():
            continue
        if key not in sections().installed:
            problems.append(problem(value.where_key, key, _unknown(key, value, sections())))
        elif not can_be_section(value):
            problems.append(
                problem(value.origin, key, f"a plugin's section is a mapping of its settings, got {name_of(value)}")
            )


def can_be_section(value: Value) -> bool:
    """Whether a value has the shape of a section. In code it may also be an object that the plugin's class takes."""
    return value.is_table or value.content is None or value.origin.in_code


def _unknown(key: str, value: Value, sections: Sections) -> str:
    from drivetrain.config.migration import meaning  # knows more words than a run ever needs

    if known := meaning(key, value):
        return f"unknown key; Accelerate has one of this name, which is here: {known}"
    if key in sections.extras:
        return f'no plugin of this name is installed; to have it: pip install "drivetrain[{key}]"'
    first, _, rest = key.partition(".")
    if rest and first in _core_keys() | sections.installed:
        return f"unknown key; dots are for the command line, in a file {rest!r} stands in the section {first!r}"
    if hint := did_you_mean(key, _core_keys() | sections.installed):
        return f"unknown key{hint}"
    plugins = ", ".join(sorted(sections.installed)) or "none"
    return f"unknown key; settings: {', '.join(field_names())}; sections of installed plugins: {plugins}"
