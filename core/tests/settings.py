"""Settings of a made-up plugin, resolved in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from drivetrain.config import Resolved, resolve
from drivetrain.config.sections import Sections

__all__ = ["SECTIONS", "Part", "run"]

SECTIONS = Sections(installed=frozenset({"part", "fp8-x"}), extras=frozenset({"part", "bigpart"}))


@attrs.frozen
class Part:
    """The section of the plugin ``part``."""

    size: int = 1
    mode: Literal["no", "yes"] = "no"
    nested: dict[str, float] = attrs.field(factory=dict)
    names: list[str] = attrs.field(factory=list)


def run(
    file: str | os.PathLike[str] | None = None,
    command_line: Mapping[str, Any] | None = None,
    code: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """``resolve`` in an environment of its own."""
    home = {"DRIVETRAIN_HOME": "/nonexistent"}
    return resolve(file, command_line, code, {**home, **(environment or {})}, sections=lambda: SECTIONS)
