"""Real processes for tests of several ranks, started once and used for many tests.

Starting a Python process with torch takes seconds, a test milliseconds. A pool starts its workers once, where it can by
forking a process that has torch already; each task gets them as a fresh world: environment variables of a launcher, an
unused port to meet at, a configuration of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drivetrain.testing.fork_server import ForkServer, fork_server
from drivetrain.testing.process import WorkerProcess, worker_environment

__all__ = ["RemoteError", "WorkerError", "WorkerPool"]

COLLECTIVE_TIMEOUT = 15
"""Seconds a rank of a task waits for the others in a collective, unless its config says otherwise."""

_AFTERMATH = 5.0
"""Seconds other ranks get to end their task after the first one failed."""

_GRACE = 3.0
"""Seconds between the moment a worker that is out of time writes down its stacks and the moment it is ended."""


@attrs.frozen
class RemoteError:
    """What went wrong on one rank."""

    rank: int
    type: str
    """Qualified name of the exception's class, such as ``"builtins.ValueError"``."""
    message: str
    traceback: str
    time: float = attrs.field(factory=time.time, eq=False, repr=False)
    """Seconds since the epoch when it happened."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type}: {self.message}\n{self.traceback}"


class WorkerError(RuntimeError):
    """A task raised on at least one rank. ``errors`` holds all of them, that of the first rank to fail in front."""

    def __init__(self, errors: Sequence[RemoteError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))

    def of(self, rank: int) -> RemoteError:
        """The error of a rank.

        Raises:
            LookupError: That rank raised none.
        """
        for error in self.errors:
            if error.rank == rank:
                return error
        raise LookupError(f"rank {rank} raised nothing; those that did: {[error.rank for error in self.errors]}")


class WorkerPool:
    """``size`` long-lived Python processes that run functions as the ranks of a world.

    Args:
        size: Number of workers.
        environment: Environment variables they start with, on top of this process's own.
        timeout: Seconds they get to start.
    """

    def __init__(self, size: int, environment: Mapping[str, str] | None = None, timeout: float = 60) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one worker, got {size}")
        self.size = size
        self._environment = worker_environment(environment or {})
        self._start_timeout = timeout
        self._workers: dict[int, WorkerProcess] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="drivetrain-pool-")
        self._closed = False

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 30,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> list[Any]:
        """Run a function on every rank at once.

        Args:
            function: A function at the top level of a module; it is found again by module and name, not sent.
            *args: Picklable; the same on all ranks.
            timeout: Seconds until all ranks must be done.
            config: Written to a YAML file that ``DRIVETRAIN_CONFIG`` names.
            environment: More environment variables for this task.
            size: Use only the first so many workers; None: all.

        Returns:
            What it returned, in rank order.

        Raises:
            WorkerError: It raised on some rank. Ranks that did not end soon after are started anew for the next task.
            TimeoutError: A rank was not done in time. The text has the stacks of all ranks; all are started anew.
        """
        if self._closed:
            raise RuntimeError("this pool is closed")
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise ValueError(f"this pool has {self.size} workers, and {size} were asked for")
        workers = self._ready(size)
        variables = {**self._world(size), **self._config(config), **(environment or {})}
        for rank, worker in enumerate(workers):
            worker.send(_task(function, args, {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, timeout))
        return self._collect(workers, timeout)

    def warm_up(self, size: int) -> list[ForkServer | None]:
        """Start what forks that many workers, and don't wait for it: their first task has less to wait for then.

        There are two of it: neighbours hash text differently then, as launched ranks do, and so order sets differently.
        """
        return [fork_server(self._environment, number) for number in range(min(2, size))]

    def _ready(self, size: int) -> list[WorkerProcess]:
        """The first workers, living; those that are missing are started side by side."""
        missing = [rank for rank in range(size) if rank not in self._workers]
        servers = self.warm_up(size) if missing else []
        for rank in missing:
            log = Path(self._directory.name) / f"worker-{rank}-{time.monotonic_ns()}.log"
            server = servers[rank % len(servers)]
            self._workers[rank] = WorkerProcess(log, self._environment, server)
        workers = [self._workers[rank] for rank in range(size)]
        deadline = time.monotonic() + self._start_timeout
        for worker in workers:
            worker.wait_until_ready(deadline)
        return workers

    def _world(self, size: int) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }

    def _config(self, config: Mapping[str, Any] | None) -> dict[str, str]:
        path = Path(self._directory.name) / "config.yaml"
        # JSON is YAML, and needs no library.
        path.write_text(json.dumps({"collective_timeout": COLLECTIVE_TIMEOUT, **(config or {})}, indent=2))
        return {"DRIVETRAIN_CONFIG": str(path), "DRIVETRAIN_HOME": self._directory.name}

    def _collect(self, workers: Sequence[WorkerProcess], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout + _GRACE
        answers: dict[int, tuple[str, Any]] = {}
        errors: list[RemoteError] = []
        while len(answers) < len(workers):
            for rank, worker in enumerate(workers):
                if rank in answers:
                    continue
                answer = worker.poll(0.002)
                if answer is None:
                    continue
                answers[rank] = answer
                if answer[0] != "result":
                    errors.append(_remote_error(rank, worker, answer))
                    deadline = min(deadline, time.monotonic() + _AFTERMATH)
            if len(answers) < len(workers) and time.monotonic() > deadline:
                break
        late = [rank for rank in range(len(workers)) if rank not in answers]
        if late and not errors:
            self._give_up(workers, late, timeout)
        for rank, worker in enumerate(workers):
            if rank in late or (rank in answers and answers[rank][0] == "ended"):
                self._end(worker)
        if errors:
            raise WorkerError(sorted(errors, key=lambda error: error.time))
        return [answers[rank][1] for rank in range(len(workers))]

    def _give_up(self, workers: Sequence[WorkerProcess], late: Sequence[int], timeout: float) -> None:
        output = "\n".join(f"--- rank {rank}\n{worker.output()}" for rank, worker in enumerate(workers))
        for worker in workers:
            self._end(worker)
        raise TimeoutError(f"ranks {late} were not done after {timeout:g} s; last output and stacks:\n{output}")

    def _end(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers = {rank: other for rank, other in self._workers.items() if other is not worker}

    def close(self) -> None:
        """End all workers. The pool can't be used afterwards."""
        self._closed = True
        for worker in list(self._workers.values()):
            self._end(worker)
        self._directory.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _task(
    function: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    name = getattr(function, "__qualname__", "")
    if not name or "<" in name:
        raise TypeError(f"{function!r} is not at the top level of a module, so a worker can't find it")
    module = sys.modules[function.__module__]
    if function.__module__ == "__main__":  # what its classes are called in the results of workers
        sys.modules.setdefault("__mp_main__", module)
    return {
        "module": function.__module__,
        "file": getattr(module, "__file__", None),
        "function": name,
        "args": pickle.dumps(tuple(args)),
        "environment": dict(variables),
        "path": list(sys.path),
        "directory": os.getcwd(),
        "timeout": timeout,
    }


def _remote_error(rank: int, worker: WorkerProcess, answer: tuple[str, Any]) -> RemoteError:
    kind, details = answer
    if kind == "error":
        return RemoteError(rank, **details)
    message = f"the process ended with exit code {details}"
    return RemoteError(rank, "ProcessEnded", message, f"last output:\n{worker.output()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
