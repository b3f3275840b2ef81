"""The default way to start processes: a plain child for a single one, torch's elastic agent for everything else."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.launch.environment import (
    RESOLVED,
    libuv_environment,
    rank_environment,
    thread_environment,
    usable_cores,
    without_other_launchers,
)
from drivetrain.launch.faults import interrupted_at, save_fault, summary
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.ports import free_port, port_is_free
from drivetrain.launch.processes import Processes
from drivetrain.launch.signals import SignalGate, Stopped, signal_name

__all__ = ["command", "needs_agent", "process_environment", "run_folder", "start"]


def start(plan: LaunchPlan) -> int:
    """Start all processes of this machine, wait for them, and say in a few lines what failed if something did.

    Everything the processes started is gone when this returns, however it ends, unless they ended well.

    Args:
        plan: With the number of processes decided.

    Returns:
        0, the exit code of the rank that failed first (128 and the number for a signal), or 128 and the number of the
        signal that stopped the launcher itself.

    Raises:
        ConfigError: The port asked for is taken.
        DrivetrainError: The machines did not find each other, or a process could not be started.
    """
    if plan.processes is None:
        raise DrivetrainError("start() needs a plan whose number of processes is decided")
    _check_port(plan)
    with run_folder(plan.resolved_config) as folder, SignalGate() as gate:
        mark = plan.resolved_config or str(folder / "resolved.yaml")
        processes = Processes(folder=folder, mark=mark, gate=gate)
        try:
            logs = _run(plan, mark, processes)
        except Stopped as stopped:
            processes.stop(stopped.signum)  # again: torch may have been about to tell of a rank it started
            return _interrupted(plan, processes, stopped.signum)
        except OSError as error:  # no program, no more processes, no folder for logs: nothing that ranks did
            processes.stop(None)
            raise DrivetrainError(f"the processes can't be started: {error}") from error
        return _outcome(plan, processes, logs)


def _run(plan: LaunchPlan, mark: str, processes: Processes) -> str | None:
    environment = process_environment(plan, mark)
    if not needs_agent(plan):
        _run_child(plan, environment, processes)
        return None
    from drivetrain.launch.agent import run_agent

    return run_agent(plan, command(plan), environment, processes)


def needs_agent(plan: LaunchPlan) -> bool:
    """Whether there is anything to coordinate, restart or copy. The agent imports torch, which takes seconds."""
    return plan.processes_total != 1 or plan.max_restarts > 0 or plan.tee != "none"


def _run_child(plan: LaunchPlan, environment: dict[str, str], processes: Processes) -> None:
    alone = {
        **rank_environment(0, 1, 0, 1),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(plan.main_process_port or free_port()),
    }
    try:
        with processes.gate.held():
            # In our own session, so that a debugger in the script has the terminal.
            child = subprocess.Popen(command(plan), env={**without_other_launchers(os.environ), **alone, **environment})
            processes.begin(0, {0: child})
        child.wait()
    except BaseException:
        processes.stop(processes.gate.signum)
        raise
    processes.check()


def command(plan: LaunchPlan) -> tuple[str, ...]:
    """What each process executes."""
    if plan.no_python:
        return (plan.script, *plan.script_args)
    worker = str(Path(__file__).with_name("worker.py"))
    return (sys.executable, worker, "module" if plan.module else "script", plan.script, *plan.script_args)


def process_environment(plan: LaunchPlan, mark: str) -> dict[str, str]:
    """Variables every process gets, beside its rank and the launcher's own environment.

    Args:
        plan: What is started.
        mark: Path of the resolved configuration.
    """

    def has_libuv() -> bool:
        from drivetrain.launch.agent import has_libuv

        return has_libuv()

    return {
        **thread_environment(os.environ, plan.processes or 1, usable_cores()),
        **libuv_environment(sys.platform, os.environ, has_libuv),
        **plan.environment,
        **({"DRIVETRAIN_DEBUG": "1"} if plan.config.debug else {}),  # read where there are no settings yet
        RESOLVED: mark,
    }


def _check_port(plan: LaunchPlan) -> None:
    port = plan.main_process_port
    if port and plan.machine_rank == 0 and not port_is_free(port):
        cure = "leave main_process_port out to get a free one" if plan.machines == 1 else "choose another"
        raise ConfigError(f"main_process_port={port} is in use on this machine; {cure}")


@contextlib.contextmanager
def run_folder(resolved_config: str | None = None) -> Iterator[Path]:
    """The run's own folder, private to the user: that of the resolved configuration, else a new one that goes again.

    Raises:
        DrivetrainError: There is no place for it.
    """
    if resolved_config is not None:
        yield Path(resolved_config).parent
        return
    try:
        folder = tempfile.mkdtemp(prefix="drivetrain-")
    except OSError as error:
        raise DrivetrainError(f"no temporary folder can be made: {error}; TMPDIR names where to make one") from error
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a leftover in the temporary folder is no reason to fail


# -------------------------------------------------------------------------------------------------------- what is said


def _outcome(plan: LaunchPlan, processes: Processes, logs: str | None) -> int:
    fault = processes.first
    if fault is None:
        return 0
    _say(summary(fault, plan.processes_total or 1, processes.stopped, logs, processes.ended))
    with contextlib.suppress(OSError):  # a full disk: the exit code is still there
        save_fault(processes.folder, fault)
    return fault.exit_code


def _interrupted(plan: LaunchPlan, processes: Processes, signum: int) -> int:
    place = interrupted_at(processes.folder, processes.attempt)
    many = len(processes.ranks)
    what = f"stopped {many} process{'es' if many != 1 else ''}" if many else "nothing was started"
    _say(f"drivetrain launch: {signal_name(signum)}: {what}{'; ' + place if place else ''}")
    return 128 + signum


def _say(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError):  # closed, or nobody reads it any more
        sys.stdout.flush()  # what the ranks wrote comes first
    print(text, file=sys.stderr, flush=True)
