"""Launching a script: the one way the command line and Python share, and the function for Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.checking import check_sections, idle_settings, telling_all
from drivetrain.errors import LaunchError
from drivetrain.launch.elastic import run_folder
from drivetrain.launch.faults import Fault, load_fault
from drivetrain.launch.plan import plan_launch
from drivetrain.launch.prepare import Prepared, check_target, launcher_environment, prepare

if TYPE_CHECKING:
    from drivetrain.config import Resolved

__all__ = ["launch_script", "ready", "run"]


def ready(
    resolved: Resolved,
    script: str,
    script_args: Sequence[str] = (),
    *,
    module: bool = False,
    no_python: bool = False,
    quiet: bool = False,
) -> Prepared:
    """Plan a launch and check all that can be checked before a process starts. Arguments as of ``launch_script``."""
    plan = plan_launch(resolved, script, script_args, module=module, no_python=no_python, quiet=quiet)
    check_target(plan)
    with telling_all(resolved):
        prepared = prepare(resolved, plan)
    check_sections(resolved)
    chosen = (prepared.plan.backend, prepared.plan.device, prepared.plan.precision)
    return attrs.evolve(prepared, notes=(*prepared.notes, *idle_settings(resolved, chosen)))


def run(prepared: Prepared, resolved: Resolved) -> tuple[int, Fault | None]:
    """Start what was prepared, hand it the configuration in one file, and wait for it.

    Returns:
        The exit code, and the first fault if the launcher saw one.
    """
    with run_folder() as folder:
        path = folder / "resolved.yaml"
        resolved.dump(path)
        plan = attrs.evolve(prepared.plan, resolved_config=str(path))
        code: int = prepared.hooks.launch(plan=plan)
        return code, load_fault(folder)


def launch_script(
    script: str | os.PathLike[str],
    script_args: Sequence[str] = (),
    *,
    module: bool = False,
    no_python: bool = False,
    config_file: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
    **core_settings: Any,
) -> None:
    """Do what ``drivetrain launch`` does, from Python, and wait for the end.

    Args:
        script: Path of a Python script, name of a module, or a program.
        script_args: Its arguments.
        module: Whether ``script`` names a module.
        no_python: Whether ``script`` is a program that is run as it is.
        config_file: A YAML file; else the usual ones.
        quiet: Whether only errors are reported.
        settings: Values by dotted key, such as ``{"fsdp.reshard_after_forward": False}``.
        core_settings: The same for keys of core, as keywords: ``num_processes=2, mixed_precision="bf16"``.

    Raises:
        LaunchError: A process failed. The text has its rank, exit code and traceback.
        ConfigError: A setting or the script is wrong; nothing was started.
        PluginError: A plugin is missing or broken; nothing was started.
        KeyboardInterrupt: The user pressed Ctrl-C; all processes have been stopped.
    """
    from drivetrain.config import resolve

    resolved = resolve(
        config_file, command_line={**core_settings, **(settings or {})}, environment=launcher_environment()
    )
    prepared = ready(resolved, os.fspath(script), script_args, module=module, no_python=no_python, quiet=quiet)
    code, fault = run(prepared, resolved)
    if fault is not None:
        raise fault.error()
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise LaunchError(-1, code, f"the launcher ended with exit code {code}")
