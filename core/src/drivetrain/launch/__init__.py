"""Starting the processes of a run: what to start, starting it, and what to say when one of them fails.

Importing this package is cheap, as all of the launcher is until an elastic agent is really needed: no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.errors import LaunchError as LaunchError
    from drivetrain.launch.elastic import start as start
    from drivetrain.launch.functions import debug_launcher as debug_launcher
    from drivetrain.launch.functions import notebook_launcher as notebook_launcher
    from drivetrain.launch.plan import LaunchPlan as LaunchPlan
    from drivetrain.launch.script import launch_script as launch_script

_PUBLIC = {
    "LaunchError": "drivetrain.errors",
    "LaunchPlan": "drivetrain.launch.plan",
    "debug_launcher": "drivetrain.launch.functions",
    "launch_script": "drivetrain.launch.script",
    "notebook_launcher": "drivetrain.launch.functions",
    "start": "drivetrain.launch.elastic",
}

__all__ = ["LaunchError", "LaunchPlan", "debug_launcher", "launch_script", "notebook_launcher", "start"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
