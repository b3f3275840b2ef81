"""From a configuration to a complete plan: check the script, choose plugins, ask them what the launcher has to know.

Everything that can be found wrong is found here, before any process starts. No device is touched, and torch is
imported only to count accelerators, where nobody said how many processes there shall be.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain import registry
from drivetrain.binding import Hooks, Origin
from drivetrain.errors import ConfigError, PluginError
from drivetrain.launch.environment import merge_environment
from drivetrain.launch.plan import LaunchPlan
from drivetrain.runtime import (
    capabilities,
    check_device_numbers,
    choose_backend,
    choose_device,
    create,
    precision_name,
)

if TYPE_CHECKING:
    from drivetrain.config import Resolved
    from drivetrain.registry import Entry

__all__ = ["Prepared", "check_processes", "check_target", "launcher_environment", "prepare"]


@attrs.frozen
class Prepared:
    """A plan, the plugins to start it with, and what was decided on the user's behalf."""

    plan: LaunchPlan
    hooks: Hooks
    notes: tuple[str, ...] = ()


def prepare(resolved: Resolved, plan: LaunchPlan) -> Prepared:
    """Complete a plan: the number of processes, the plugins, the environment they want.

    Args:
        resolved: The configuration.
        plan: Made of it by ``plan_launch``.

    Raises:
        ConfigError: A plugin's section is wrong, the backend is for one process only, or ``gpu_ids`` names too few.
        PluginError: A plugin that was named is missing or broken, or none fits.
    """
    device, notes = choose_device(resolved)
    plan = attrs.evolve(plan, device=device.name)
    if plan.processes is None:
        # The backend has a say if it was named; if not, it is chosen by the number that is asked for here.
        named = [] if resolved.run.backend is None else [choose_backend(resolved, _SEVERAL)[0]]
        plan = attrs.evolve(plan, processes=_process_count(_hooks(resolved, [device, *named]), plan))
    backend, said = choose_backend(resolved, plan.processes_total or 1)
    plan = attrs.evolve(plan, backend=backend.name)
    # None for a family, whose member depends on a device that only workers touch.
    precision = registry.find_precision(precision_name(resolved), where=resolved.origin("mixed_precision").where)
    hooks = _hooks(resolved, [device, backend, *([precision] if precision else [])])
    _check_many(hooks, backend, plan.processes_total or 1, resolved)
    check_device_numbers(resolved.run, plan.processes or 1, registry.load(device).label)
    plan = attrs.evolve(plan, environment=_environment(hooks, plan))
    return Prepared(plan, hooks, (*notes, *said))


_SEVERAL = 2
"""Stands for "several" while the number of processes is not known."""


class _LauncherDefaults:
    """Core's defaults for the launcher's hooks, without importing torch where that can be avoided."""

    def launch(self, plan: LaunchPlan) -> int:
        from drivetrain.launch.elastic import start

        return start(plan)

    def launch_environment(self, plan: LaunchPlan) -> Mapping[str, str]:
        return {}

    def process_count(self, plan: LaunchPlan) -> int:
        from drivetrain.defaults import process_count

        return process_count(plan)


def _hooks(resolved: Resolved, entries: Iterable[Entry]) -> Hooks:
    hooks = Hooks(_LauncherDefaults())
    for entry in entries:
        origin = Origin(entry.role, entry.name, entry.distribution, entry.version)
        hooks.register(create(entry, resolved), origin)
    return hooks


def _process_count(hooks: Hooks, plan: LaunchPlan) -> int:
    if isinstance(plan.config.gpu_ids, list):  # whoever named the devices has said how many, whatever kind they are
        return len(plan.config.gpu_ids)
    count: Any = hooks.process_count(plan=plan)
    if not isinstance(count, int) or count < 1:
        raise PluginError(f"process_count of {hooks.owner('process_count')} must be a number from 1, got {count!r}")
    return count


def check_processes(resolved: Resolved, backend: Entry) -> None:
    """Check that a backend takes the number of processes that settings ask for.

    Raises:
        ConfigError: It works with one process only.
        PluginError: The plugin can't be used.
    """
    if resolved.run.num_processes is not None:
        _check_many(_hooks(resolved, [backend]), backend, resolved.run.num_processes, resolved)


def _check_many(hooks: Hooks, entry: Entry, processes: int, resolved: Resolved) -> None:
    """Refuse several processes for a backend that works with one, before they find out one by one."""
    backend: Any = hooks.plugin("backend")
    launcher = hooks.owner("launch")
    its_own = launcher is not None and launcher.role == "backend"
    if processes == 1 or its_own or capabilities(entry, backend).many_processes:
        return
    raise ConfigError(
        f"num_processes={processes} ({resolved.origin('num_processes')}), but backend {entry.name!r} "
        f"({resolved.origin('backend')}) works with one process. Name a backend for several, or leave it out to get "
        f"the installed default; `drivetrain plugins` lists them"
    )


def _environment(hooks: Hooks, plan: LaunchPlan) -> dict[str, str]:
    """What plugins want set. Each must answer with a mapping."""
    owners = [str(origin) for origin in hooks.owners("launch_environment")]
    answers: Any = hooks.launch_environment(plan=plan)
    wanted = list(zip([*owners, "core"], answers, strict=True))
    for owner, variables in wanted:
        if not isinstance(variables, Mapping):
            raise PluginError(f"launch_environment of {owner} must return a mapping, got {variables!r}")
    return merge_environment(wanted, os.environ)


def launcher_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment a launcher reads settings from: a rank that starts another run does not hand on its own."""
    return {name: value for name, value in environment.items() if name != "DRIVETRAIN_RESOLVED"}


# ----------------------------------------------------------------------------------------------------------- the script


def check_target(plan: LaunchPlan) -> None:
    """Check that there is something to run.

    Raises:
        ConfigError: The script, module or program does not exist or can't be read.
    """
    if plan.no_python:
        _check_program(plan.script)
    elif plan.module:
        _check_module(plan.script)
    else:
        _check_script(plan.script)


def _check_program(program: str) -> None:
    if shutil.which(program) is None:
        raise ConfigError(f"--no_python: {program!r} is no program that can be executed, nor found in PATH")


def _check_module(name: str) -> None:
    if name.endswith(".py") or os.sep in name or not all(name.split(".")):
        raise ConfigError(f"--module wants the name of a module, such as package.train, got {name!r}")
    package = name.partition(".")[0]
    found = package in sys.builtin_module_names or any(_offers(package, folder) for folder in (_here(), None))
    if not found:
        raise ConfigError(f"--module: no module {package!r} in {_here()} or among the installed packages")


def _offers(package: str, folder: str | None) -> bool:
    """Whether a top-level module is found in a folder, or in ``sys.path``, without importing it."""
    if folder is None:
        with contextlib.suppress(ValueError):  # one that is running already and was never a module, such as __main__
            return importlib.util.find_spec(package) is not None
        return False
    return importlib.machinery.PathFinder.find_spec(package, [folder]) is not None


def _check_script(script: str) -> None:
    path = Path(script)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no script {script!r} in {_here()}{_similar(path)}") from None
    except OSError as error:  # its folder is closed to us, say, or the name too long
        raise ConfigError(f"script {script!r} can't be read: {error.strerror}") from error
    if path.is_dir() and not os.path.exists(path / "__main__.py"):
        raise ConfigError(f"{script!r} is a folder without a __main__.py; name a script")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script {script!r} can't be read: permission denied")


def _here() -> str:
    """The current folder."""
    try:
        return os.getcwd()
    except OSError:
        return "the current folder, which has been removed"


def _similar(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"; there is no folder {str(path.parent)!r} either"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""
