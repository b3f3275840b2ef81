"""The environment variables processes are started with, beside the launcher's own. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from drivetrain.errors import PluginError

__all__ = [
    "RESOLVED",
    "libuv_environment",
    "merge_environment",
    "rank_environment",
    "thread_environment",
    "usable_cores",
    "without_other_launchers",
]

RESOLVED = "DRIVETRAIN_RESOLVED"
"""The one variable that hands the configuration to workers: path of the resolved file. It also marks every process of
a run, since each run's file has a path of its own."""


def rank_environment(local_rank: int, local_size: int, machine_rank: int, machines: int) -> dict[str, str]:
    """Where a process stands, in the variables of ``torch.distributed.run``. Every machine starts as many.

    Args:
        local_rank: Number of the process on its machine.
        local_size: Processes on each machine.
        machine_rank: Number of the machine.
        machines: Number of machines.
    """
    return {
        "RANK": str(machine_rank * local_size + local_rank),
        "WORLD_SIZE": str(machines * local_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(machine_rank),
        "GROUP_WORLD_SIZE": str(machines),
    }


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy without what another elastic agent told the launcher itself.

    A process that is started directly but finds ``TORCHELASTIC_USE_AGENT_STORE`` would wait for an agent's store.
    """
    return {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}


def usable_cores() -> int:
    """Processor cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def thread_environment(environment: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """``OMP_NUM_THREADS`` for one of several processes that share a machine, unless the user set it.

    Left alone for a single process, where torch's own choice is better (physical cores, not logical ones).
    """
    if "OMP_NUM_THREADS" in environment or processes == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // processes))}


def libuv_environment(platform: str, environment: Mapping[str, str], has_libuv: Callable[[], bool]) -> dict[str, str]:
    """``USE_LIBUV=0`` on Windows where torch was built without libuv, unless the user set it.

    Args:
        platform: ``sys.platform``.
        environment: The user's environment.
        has_libuv: Asks torch. Called on Windows only, since it imports torch.
    """
    if platform != "win32" or "USE_LIBUV" in environment or has_libuv():
        return {}
    return {"USE_LIBUV": "0"}


def merge_environment(
    wanted: Iterable[tuple[str, Mapping[str, str]]], environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that plugins want for workers, in one mapping, without those the user set.

    Args:
        wanted: For each plugin, what it is called in messages, and its variables.
        environment: The user's environment, which wins.

    Raises:
        PluginError: Two plugins want different values of one variable, or one is no text.
    """
    merged: dict[str, str] = {}
    owner: dict[str, str] = {}
    for plugin, variables in wanted:
        for name, value in variables.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise PluginError(
                    f"launch_environment of {plugin}: names and values must be text, got {name!r}: {value!r}"
                )
            if name in merged and merged[name] != value:
                raise PluginError(
                    f"environment variable {name}: {owner[name]} wants {merged[name]!r}, but {plugin} wants "
                    f"{value!r}. Set {name} yourself to decide, or choose another of the two"
                )
            merged[name], owner[name] = value, plugin
    return {name: value for name, value in merged.items() if name not in environment}
