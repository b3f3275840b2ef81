"""From a configuration to a complete plan: check the script, choose plugins, ask them what the launcher has to know.

Everything that can be found wrong is found here, before any process starts. No device is touched, and torch is
imported only to count accelerators, where nobody said how many processes there shall be.
"""

from __future__ import annotations

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
from drivetrain.runtime import capabilities, choose_backend, choose_device, create, precision_name

if TYPE_CHECKING:
    from drivetrain.config import Resolved
    from drivetrain.registry import Entry

__all__ = ["Prepared", "check_target", "launcher_environment", "prepare"]


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
        ConfigError: A plugin's section is wrong, or the backend is for one process only.
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
    _check_many(hooks, backend, plan, resolved)
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


def _check_many(hooks: Hooks, entry: Entry, plan: LaunchPlan, resolved: Resolved) -> None:
    """Refuse several processes for a backend that works with one, before they find out one by one."""
    backend: Any = hooks.plugin("backend")
    launcher = hooks.owner("launch")
    its_own = launcher is not None and launcher.role == "backend"
    if plan.processes_total == 1 or its_own or capabilities(entry, backend).many_processes:
        return
    raise ConfigError(
        f"num_processes={plan.processes_total} ({resolved.origin('num_processes')}), but backend {plan.backend!r} "
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
    if name.endswith(".py") or os.sep in name:
        raise ConfigError(f"--module wants the name of a module, such as package.train, got {name!r}")
    package = name.partition(".")[0]
    found = package in sys.builtin_module_names or any(_offers(package, folder) for folder in (os.getcwd(), None))
    if not found:
        raise ConfigError(f"--module: no module {package!r} in {os.getcwd()} or among the installed packages")


def _offers(package: str, folder: str | None) -> bool:
    """Whether a top-level module is found in a folder, or in ``sys.path``, without importing it."""
    if folder is None:
        return importlib.util.find_spec(package) is not None
    return importlib.machinery.PathFinder.find_spec(package, [folder]) is not None


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise ConfigError(f"no script {script!r} in {os.getcwd()}{_similar(path)}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"{script!r} is a folder without a __main__.py; name a script")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script {script!r} can't be read: permission denied")


def _similar(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"; there is no folder {str(path.parent)!r} either"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""
