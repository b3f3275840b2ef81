"""What may be asked for in a process that runs already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.errors import StateConflictError

if TYPE_CHECKING:
    from drivetrain.config import Resolved
    from drivetrain.runtime import Runtime

__all__ = ["added", "check_right", "check_same", "differing", "of_the_world"]

_OF_THE_WORLD = frozenset({"device", "gpu_ids", "collectives", "collective_timeout", "init_method"})


def of_the_world(key: str) -> bool:
    """Whether a setting decides where processes run or how they meet, and so can't change once they have."""
    from drivetrain.config.schema import world_keys

    return key in _OF_THE_WORLD or key in world_keys()


def added(resolved: Resolved, code: Mapping[str, Any]) -> Resolved:
    """The settings of a run, and over them those asked for in code later.

    Raises:
        ConfigError: One of these is unknown, or has no possible value.
        PluginNotFoundError: One is the name of no plugin.
    """
    from drivetrain.config import Origin, Resolved
    from drivetrain.config.layers import from_arguments

    check_right(code)
    return Resolved(layers=(*resolved.layers, from_arguments(code, Origin("code"))), config_file=resolved.config_file)


def differing(runtime: Runtime, code: Mapping[str, Any]) -> list[str]:
    """Keys of settings asked for in code of which a run has another value."""
    return [key for key, wanted in code.items() if not _is_as_asked(runtime, key, wanted)]


def _is_as_asked(runtime: Runtime, key: str, wanted: Any) -> bool:
    if wanted == {}:  # an empty section asks for nothing
        return True
    if key == "device" and wanted == runtime.run.world.device.type:
        return True
    chosen = runtime.run.names.get({"mixed_precision": "precision"}.get(key, key))
    return wanted in (runtime.resolved.value(key), chosen)


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
    for key in differing(runtime, code):
        check_right(code)
        raise StateConflictError(
            f"this process already runs with {key}={runtime.resolved.value(key)!r} ({runtime.resolved.origin(key)}), "
            f"so it can't have {key}={code[key]!r} now; create the first Accelerator or state with it"
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
