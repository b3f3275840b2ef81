"""Starting processes that run a function of this program: for notebooks, where there is no script, and for tests."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs

from drivetrain.errors import ConfigError, LaunchError
from drivetrain.launch.environment import rank_environment, thread_environment, usable_cores
from drivetrain.launch.ports import free_port

__all__ = ["debug_launcher", "function_environment", "notebook_launcher"]

_GRACE = 5.0
"""Seconds the other processes get to end by themselves once one has failed."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Run a function in several processes of this machine, forked from this one, and wait for all of them.

    The function may be a closure or come from a notebook's cell. It has to build everything itself, model and
    Accelerator included: a process with an initialised accelerator can't be forked.

    Args:
        function: Called in every process, with the variables of ``torch.distributed.run`` set.
        args: Its arguments.
        num_processes: On this machine; None: what the configuration says, else one for each device.
        mixed_precision: Of the run; None: what the configuration says.
        use_port: Port on the first machine; None or 0: a free one, on one machine only.
        master_addr: Address of the first machine.
        node_rank: Number of this machine.
        num_nodes: Number of machines.
        rdzv_backend: Only ``static``; machines that come and go need ``drivetrain launch``.
        rdzv_endpoint: As ``address:port``, instead of the two above.
        rdzv_conf: Not supported.
        rdzv_id: Has no meaning for a static rendezvous.
        max_restarts: How often all processes are started anew after a failure.
        monitor_interval: Seconds between two looks at the processes.
        log_line_prefix_template: Not supported.

    Returns:
        What the function returned, for each process of this machine. None where it can't be pickled.

    Raises:
        LaunchError: A process failed. The text has its rank and traceback.
        ConfigError: An argument can't be had, or an accelerator is initialised already.
    """
    _refuse(rdzv_backend != "static", "rdzv_backend", rdzv_backend)
    _refuse(bool(rdzv_conf), "rdzv_conf", rdzv_conf)
    _refuse(log_line_prefix_template is not None, "log_line_prefix_template", log_line_prefix_template)
    if rdzv_endpoint:
        master_addr, _, use_port = rdzv_endpoint.rpartition(":")
    if num_nodes > 1 and not int(use_port or 0):
        raise ConfigError("num_nodes above 1 needs use_port: a port that is free on the first machine")
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"node_rank must be below num_nodes and from 0, got {node_rank} of {num_nodes}")
    processes = _processes() if num_processes is None else num_processes
    if processes < 1:
        raise ConfigError(f"num_processes must be at least 1, got {processes}")
    extra = {} if mixed_precision is None else {"DRIVETRAIN_MIXED_PRECISION": str(mixed_precision)}
    for attempt in range(max_restarts + 1):
        world = function_environment(processes, node_rank, num_nodes, master_addr, int(use_port or 0) or free_port())
        try:
            return _run(function, args, [{**variables, **extra} for variables in world], monitor_interval)
        except LaunchError as error:
            if attempt == max_restarts:
                raise
            print(f"{error}\nrestart {attempt + 1} of {max_restarts}", file=sys.stderr)
    raise AssertionError("unreachable")


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run a function in several processes on the CPU, to try out what it does in many before there are many devices.

    Args:
        function: Called in every process.
        args: Its arguments.
        num_processes: How many.

    Returns:
        What the function returned, for each process.

    Raises:
        LaunchError: A process failed. The text has its rank and traceback.
    """
    world = function_environment(num_processes, 0, 1, "127.0.0.1", free_port())
    return _run(function, args, [{**variables, "DRIVETRAIN_DEVICE": "cpu"} for variables in world], 0.1)


def function_environment(
    processes: int, node_rank: int, num_nodes: int, address: str, port: int
) -> list[dict[str, str]]:
    """The variables of each process on one machine. Rank = processes on a machine x number of the machine + local rank.

    Args:
        processes: On each machine.
        node_rank: Number of this machine.
        num_nodes: Number of machines.
        address: Of the first machine.
        port: On the first machine.
    """
    return [
        {
            **rank_environment(local, processes, node_rank, num_nodes),
            **thread_environment(os.environ, processes, usable_cores()),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for local in range(processes)
    ]


def _refuse(given: bool, name: str, value: Any) -> None:
    if given:
        raise ConfigError(f"notebook_launcher: {name}={value!r} is not supported; `drivetrain launch` can do that")


def _processes() -> int:
    """How many processes the configuration asks for on this machine."""
    from drivetrain.config import resolve
    from drivetrain.launch.plan import plan_launch
    from drivetrain.launch.prepare import launcher_environment, prepare

    resolved = resolve(command_line={}, environment=launcher_environment())
    return prepare(resolved, plan_launch(resolved, "a function")).plan.processes or 1


# -------------------------------------------------------------------------------------------- the processes themselves


@attrs.define(eq=False)
class _Worker:
    """A forked process, and the line on which it tells what became of the function."""

    rank: int
    process: Any
    line: Connection
    answer: tuple[str, Any] | None = None

    @property
    def raised(self) -> tuple[float, str] | None:
        """When it raised, and the traceback."""
        return self.answer[1] if self.answer is not None and self.answer[0] == "raised" else None

    def receive(self) -> None:
        """Take the answer, if it is there; a process that died has none."""
        while self.answer is None and self.line.poll():
            try:
                self.answer = self.line.recv()
            except (EOFError, OSError):
                return


def _run(function: Callable[..., Any], args: Sequence[Any], world: list[dict[str, str]], interval: float) -> list[Any]:
    import multiprocessing

    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            "functions can only be started in other processes where the system can fork (not on Windows); put the "
            "function into a script and use `drivetrain launch`"
        )
    _check_not_initialised()
    sys.stdout.flush()
    sys.stderr.flush()
    context = multiprocessing.get_context("fork")
    workers: list[_Worker] = []
    try:
        for variables in world:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(function, args, variables, theirs))
            with warnings.catch_warnings():
                # Python 3.12 warns of forking with threads, of which every notebook has some. They aren't ours.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            workers.append(_Worker(int(variables["RANK"]), process, ours))
        return _collect(workers, interval)
    finally:
        _stop(workers)


def _collect(workers: list[_Worker], interval: float) -> list[Any]:
    """Wait until all have ended, or one has failed."""
    from multiprocessing.connection import wait

    while True:
        # Asked before the lines are read: what a process sent before it ended is then read in this round.
        running = [worker for worker in workers if worker.process.exitcode is None]
        for worker in workers:
            worker.receive()
        failed = [worker for worker in workers if _has_failed(worker)]
        if failed:
            raise _error(failed)
        if not running:
            return [_result(worker) for worker in workers]
        silent = [worker.line for worker in running if worker.answer is None]
        wait([*(worker.process.sentinel for worker in running), *silent], interval)


def _has_failed(worker: _Worker) -> bool:
    return worker.raised is not None or worker.process.exitcode not in (None, 0)


def _error(failed: list[_Worker]) -> LaunchError:
    # One that was killed had no time to say when; what the others raise then is the consequence.
    first = min(failed, key=lambda worker: worker.raised[0] if worker.raised else 0.0)
    if first.raised:
        return LaunchError(first.rank, 1, f"exception in the function\n{first.raised[1]}")
    code = first.process.exitcode
    if code < 0:
        from drivetrain.launch.signals import signal_name

        return LaunchError(first.rank, 128 - code, f"killed by {signal_name(-code)}")
    return LaunchError(first.rank, code, f"exit code {code}")


def _result(worker: _Worker) -> Any:
    if worker.answer is None:
        return None  # it called sys.exit(0)
    kind, value = worker.answer
    if kind == "unpicklable":
        warnings.warn(f"rank {worker.rank}: what the function returned can't be sent back, so None is: {value}")
        return None
    return pickle.loads(value)


def _stop(workers: list[_Worker]) -> None:
    """Let nothing run on, whatever happened."""
    import psutil

    family = []
    for worker in workers:
        if worker.process.exitcode is None:
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                family += psutil.Process(worker.process.pid).children(recursive=True)
            worker.process.terminate()
    end = time.monotonic() + _GRACE
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        worker.line.close()
    for process in family:
        with contextlib.suppress(psutil.Error):  # gone with its parent
            process.kill()


def _child(function: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, str], line: Connection) -> None:
    """What a forked process does. Its environment is its own, so it may be written."""
    os.environ.update(variables)
    os.environ.pop("DRIVETRAIN_RESOLVED", None)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the pool of threads did not come with the fork, and waiting for it never ends
    try:
        value = function(*args)
    except SystemExit:
        raise
    except BaseException as error:
        line.send(
            ("raised", (time.time(), "".join(traceback.format_exception(type(error), error, error.__traceback__))))
        )
        raise
    line.send(_pickled(value))


def _pickled(value: Any) -> tuple[str, Any]:
    buffer = io.BytesIO()
    try:
        pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # whatever __reduce__ of any object raises; the caller is told
        return "unpicklable", f"{type(error).__name__}: {error}"
    return "returned", buffer.getvalue()


def _check_not_initialised() -> None:
    """Refuse to fork a process whose accelerator is in use: its children would share a context that can't be shared.

    Raises:
        ConfigError: It is; the text says which.
    """
    torch = sys.modules.get("torch")
    accelerator = torch.accelerator.current_accelerator() if torch is not None else None
    if torch is None or accelerator is None:
        return
    initialised = getattr(torch.get_device_module(accelerator.type), "is_initialized", None)
    if initialised is not None and initialised():
        raise ConfigError(
            f"the accelerator {accelerator.type!r} is already initialised in this process (a tensor or model was put "
            f"on it, or an Accelerator was created), and a process that uses one can't be forked. Restart the "
            f"kernel, and build model, data and Accelerator inside of the function"
        )
