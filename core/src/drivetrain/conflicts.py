"""What a second Accelerator may ask for, in a process that runs already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.errors import StateConflictError

if TYPE_CHECKING:
    from drivetrain.runtime import Runtime

__all__ = ["check_right", "check_same"]


def check_same(runtime: Runtime, code: Mapping[str, Any], config_file: Any) -> None:
    """Raise where a run has other settings than those asked for in code; what is not asked for may be as it likes.

    Args:
        runtime: The run that is there.
        code: Settings by key.
        config_file: File whose settings are asked for; None: of none.

    Raises:
        ConfigError: A setting is wrong in itself; so is the name of no plugin.
        StateConflictError: The run has another value, or was started without that file.
    """
    for key, wanted in code.items():
        if wanted == {}:  # an empty section asks for nothing
            continue
        have = runtime.resolved.value(key)
        chosen = runtime.run.names.get({"mixed_precision": "precision"}.get(key, key))
        if wanted not in (have, chosen):
            check_right(code)
            raise StateConflictError(
                f"this process already runs with {key}={have!r} ({runtime.resolved.origin(key)}), "
                f"so it can't have {key}={wanted!r} now; create the first Accelerator or state with it"
            )
    if config_file is not None:
        _check_file(runtime.resolved.config_file, os.path.expanduser(os.fspath(config_file)))


def _check_file(have: str | None, wanted: str) -> None:
    if have is None or os.path.realpath(wanted) != os.path.realpath(have):
        raise StateConflictError(
            f"this process already runs with {f'the settings of {have}' if have else 'no config file'}, so those of "
            f"{wanted} can't be read now; create the first Accelerator with it"
        )


def check_right(code: Mapping[str, Any]) -> None:
    """Raise for settings that are wrong in themselves: the mistake to mend before any conflict.

    Raises:
        ConfigError: One is unknown, or has no possible value.
        PluginNotFoundError: One is the name of no plugin.
    """
    if not code:
        return
    from drivetrain.checking import NAMING, named, telling_all
    from drivetrain.config import Origin, Resolved
    from drivetrain.config.layers import from_arguments
    from drivetrain.config.problems import fail
    from drivetrain.config.sections import check_top_level, installed_sections

    layer = from_arguments(code, Origin("code"))
    unknown: list[str] = []
    check_top_level(layer, installed_sections, unknown)
    if unknown:
        fail(unknown)
    asked = Resolved(layers=(layer,))
    with telling_all(asked):
        for key in NAMING:
            named(asked, key)
