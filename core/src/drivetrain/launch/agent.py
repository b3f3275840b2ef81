"""torch's elastic agent with this launcher's eyes: it starts and restarts the ranks, we watch and stop them.

The agent alone waits 30 s for each rank that ignores a SIGTERM, forgets who failed first, and leaves the children of
ranks behind. Its documented extension points are enough to do better; everything else is torch's. Imports torch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drivetrain.errors import DrivetrainError
from drivetrain.launch.plan import LaunchPlan, rendezvous_options
from drivetrain.launch.processes import Processes
from drivetrain.launch.signals import Stopped

__all__ = ["has_libuv", "run_agent"]

_TEE = {"none": Std.NONE, "stdout": Std.OUT, "stderr": Std.ERR, "all": Std.ALL}

_RENDEZVOUS_TIMEOUT = 900
"""Seconds machines wait for each other, unless ``rdzv_conf`` says ``timeout=``."""


def run_agent(
    plan: LaunchPlan, command: tuple[str, ...], environment: Mapping[str, str], processes: Processes
) -> str | None:
    """Start the ranks of this machine, as often as the plan allows, and wait for them.

    Args:
        plan: With the number of processes decided.
        command: What each rank executes.
        environment: Variables each gets, beside the agent's own and the launcher's.
        processes: Watches the ranks; keeps the first fault of the last attempt.

    Returns:
        The folder with the output of the ranks, None if it was not asked for.

    Raises:
        Stopped: A signal asked the launcher to end; all ranks have been stopped.
        DrivetrainError: The machines did not find each other.
    """
    own_logs = plan.log_dir is None
    logs = _Logs(environment, str(processes.folder / "logs") if own_logs else str(plan.log_dir), tee=_TEE[plan.tee])
    with _quiet_torch(plan), _agent_environment(plan), _live_output(plan):
        handler = _rendezvous(plan, processes.folder.name)
        agent = _Agent(_spec(plan, command, handler), logs, processes, plan)
        try:
            agent.run()
        except (RendezvousError, DistError) as error:
            raise DrivetrainError(_not_met(plan, error)) from error
        except SignalException as error:  # came in the moment in which torch's handlers were in place
            raise Stopped(error.sigval) from None
        finally:
            handler.shutdown()
    return None if own_logs else logs.folder


class _Logs(DefaultLogsSpecs):
    """Where each rank's output goes. Also the agent's one place for variables of ranks that are not its own."""

    def __init__(self, environment: Mapping[str, str], log_dir: str, tee: Std) -> None:
        super().__init__(log_dir=log_dir, tee=tee)
        self._environment = environment

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables.update(self._environment)
        return super().reify(envs)

    @property
    def folder(self) -> str:
        """The folder of this run in the folder of all logs."""
        return str(getattr(self, "_run_log_dir", None) or self.root_log_dir)


class _Agent(LocalElasticAgent):
    """The elastic agent of this machine, watched."""

    def __init__(self, spec: WorkerSpec, logs: _Logs, processes: Processes, plan: LaunchPlan) -> None:
        super().__init__(spec, logs, log_line_prefix_template="[rank ${rank}] ")
        self._processes = processes
        self._plan = plan

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        attempt = self._plan.max_restarts - self._remaining_restarts
        if attempt and not self._plan.quiet:
            self._say_restart(attempt)
        try:
            pids: dict[int, int] = super()._start_workers(worker_group)
        finally:
            self._processes.gate.install()  # torch has put its own handlers in their place, and never takes them back
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            raise DrivetrainError(f"this version of torch starts ranks by {type(context).__name__}; please report it")
        ranks = {
            worker_group.workers[local].global_rank: handler.proc
            for local, handler in context.subprocess_handlers.items()
        }
        self._processes.begin(attempt, ranks)
        return pids

    def _say_restart(self, attempt: int) -> None:
        fault = self._processes.first
        why = f"rank {fault.rank} failed ({fault.how})" if fault else "the group of machines changed"
        print(f"drivetrain launch: {why}; restart {attempt} of {self._plan.max_restarts}", file=sys.stderr, flush=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._processes.check()  # when it returns, either all is well or every rank has ended
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if any(process.poll() is None for process in self._processes.ranks.values()):
            self._processes.stop(self._processes.gate.signum)
        super()._shutdown(death_sig, timeout)


def _spec(plan: LaunchPlan, command: tuple[str, ...], handler: RendezvousHandler) -> WorkerSpec:
    static = _is_static(plan)
    return WorkerSpec(
        role="rank",
        local_world_size=plan.processes or 1,
        rdzv_handler=handler,
        entrypoint=command[0],
        args=command[1:],
        max_restarts=plan.max_restarts,
        monitor_interval=plan.monitor_interval,
        master_addr=plan.main_process_ip if static else None,
        master_port=plan.main_process_port if static else None,
    )


def _is_static(plan: LaunchPlan) -> bool:
    """Whether ranks are given out by machine number.

    A single machine meets itself by other means, on a port that torch finds and keeps: two jobs can't choose the same.
    """
    return plan.machines > 1 and plan.rdzv_backend == "static"


def _rendezvous(plan: LaunchPlan, run_id: str) -> RendezvousHandler:
    """How the agents of all machines find each other.

    Raises:
        DrivetrainError: The options are refused, or the meeting point can't be reached.
    """
    options: dict[str, str | int | bool] = {"timeout": _RENDEZVOUS_TIMEOUT, **rendezvous_options(plan.rdzv_conf)}
    if plan.machines == 1:
        backend, endpoint, address = "c10d", f"127.0.0.1:{plan.main_process_port or 0}", "127.0.0.1"
        options["is_host"] = True
    else:
        # All machines must call the job alike, and have nothing in common but the address.
        run_id = "drivetrain"
        backend, endpoint, address = plan.rdzv_backend, f"{plan.main_process_ip}:{plan.main_process_port}", None
        if _is_static(plan):
            options["rank"] = plan.machine_rank
        else:
            options.setdefault("is_host", plan.machine_rank == 0)
    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                backend=backend,
                endpoint=endpoint,
                run_id=run_id,
                min_nodes=plan.machines,
                max_nodes=plan.machines,
                local_addr=address,
                **options,
            )
        )
    except (RendezvousError, RuntimeError, ValueError) as error:
        raise DrivetrainError(_not_met(plan, error)) from error


def _not_met(plan: LaunchPlan, error: Exception) -> str:
    where = f"{plan.main_process_ip or '127.0.0.1'}:{plan.main_process_port or 'any port'}"
    cure = "Check that all machines were started, with one address, port and rdzv_conf, and that no firewall is between"
    return (
        f"machine {plan.machine_rank} of {plan.machines} did not meet the others at {where} "
        f"(rdzv_backend={plan.rdzv_backend}): {error or type(error).__name__}"
        + (f". {cure}" if plan.machines > 1 else "")
    )


# ------------------------------------------------------------------------------------ what the agent takes from outside


@contextmanager
def _quiet_torch(plan: LaunchPlan) -> Iterator[None]:
    """Silence the agent's own reports: ours say the same in fewer words. Kept with ``--debug``."""
    names = () if plan.config.debug else tuple(logging.root.manager.loggerDict)
    loggers = [logging.getLogger(name) for name in names if name.startswith("torch.distributed")]
    before = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in before:
            logger.disabled = disabled


@contextmanager
def _agent_environment(plan: LaunchPlan) -> Iterator[None]:
    """Set what the agent reads from this process's own environment, for as long as it runs.

    After a restart, ranks that meet in the store of the attempt before find its stale addresses there and never
    connect; with this variable, torch gives every attempt a store of its own.
    """
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if not plan.max_restarts or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _live_output(plan: LaunchPlan) -> Iterator[None]:
    """While the agent copies the ranks' output to our own, write it line by line, into a pipe too."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if plan.tee == "none" or reconfigure is None:
        yield
        return
    before = sys.stdout.line_buffering
    reconfigure(line_buffering=True)
    try:
        yield
    finally:
        reconfigure(line_buffering=before)


def has_libuv() -> bool:
    """Whether this torch can use libuv for its stores. Only Windows builds differ in that."""
    try:
        TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False, use_libuv=True)
    except RuntimeError:
        return False
    return True
