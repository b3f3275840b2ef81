"""A process that has imported torch and forks workers, which then need not: importing takes seconds, forking none.

The process that wants workers talks to it over a socket. Eight bytes are a request: 0, with three open files, for a
child that has these as its standard streams and runs :mod:`drivetrain.testing.worker`; the id of a child for its exit
code. Eight bytes are the answer.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO

import attrs
import psutil

from drivetrain.testing import worker

__all__ = ["Forked", "ForkServer", "fork_server"]

_PATIENCE = 60.0
"""Seconds to wait for an answer; the first one comes when torch has been imported."""
_FORK = 0
_NUMBER = struct.Struct("q")
_KEPT = 4
"""Servers that are kept for workers with the same environment. More live only as long as their workers."""


class ForkServer:
    """The parent's end: starts the process at once, and does not wait for it.

    It ends with this process, or when nobody refers to it any more.

    Args:
        environment: All of its environment variables, which are those of its children.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._can_fork: bool | None = None
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_PATIENCE)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is this process's affair
            )
        weakref.finalize(self, _end, self._channel, process)

    def fork(self, log: IO[bytes]) -> Forked | None:
        """Start a worker.

        Args:
            log: An open file for what it prints.

        Returns:
            The worker; None if there is none to be had, since the server is gone or its children could not do
            everything that a new process can. The reason, such as a broken torch, shows in a new process too.
        """
        with contextlib.ExitStack() as theirs, self._lock:
            if self._can_fork is None:
                self._can_fork = self._receive() == 1
            if not self._can_fork:
                return None
            (tasks, ours_tasks), (ours_answers, answers) = os.pipe(), os.pipe()
            for descriptor in (tasks, answers):
                theirs.callback(os.close, descriptor)
            stdin, stdout = os.fdopen(ours_tasks, "wb"), os.fdopen(ours_answers, "rb")
            pid = self._ask(_FORK, (tasks, answers, log.fileno()))
            if pid is None:
                self._can_fork = False
                stdin.close()
                stdout.close()
                return None
            return Forked(pid, stdin, stdout, self)

    def exit_code(self, pid: int) -> int | None:
        """Wait for the end of a child. As of ``subprocess.Popen``; None if the server is gone, which alone knew it."""
        with self._lock:
            code = self._ask(pid)
        if code is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait()
        return code

    def _ask(self, request: int, files: Sequence[int] = ()) -> int | None:
        try:
            socket.send_fds(self._channel, [_NUMBER.pack(request)], files)
        except OSError:
            return None
        return self._receive()

    def _receive(self) -> int | None:
        try:
            answer = self._channel.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:
            return None
        number: int | None = _NUMBER.unpack(answer)[0] if len(answer) == _NUMBER.size else None
        return number


def _end(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.kill()
    process.wait()


@attrs.define(eq=False)
class Forked:
    """A worker that was forked, seen as :class:`subprocess.Popen` shows a process."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    _server: ForkServer
    _returncode: int | None = None
    _ended: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def wait(self) -> int | None:
        """Wait for its end; returns its exit code, None if that is not known."""
        with self._lock:
            if not self._ended:
                self._returncode, self._ended = self._server.exit_code(self.pid), True
            return self._returncode


def fork_server(environment: Mapping[str, str], number: int) -> ForkServer | None:
    """The server for an environment, which may have forked others before; it is started if it has to be.

    Args:
        environment: All environment variables.
        number: Tells several servers for one environment apart. Their children hash text differently.

    Returns:
        The server; None on a system where a process can't be forked safely.
    """
    return _server(frozenset(environment.items()), number) if sys.platform == "linux" else None


@functools.lru_cache(_KEPT)
def _server(environment: frozenset[tuple[str, str]], number: int) -> ForkServer:
    return ForkServer(dict(environment))


# ------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    """Serve requests; in a child, run the worker."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _warm_up()
        channel.sendall(_NUMBER.pack(_can_fork()))
        is_child = _serve(channel)
    if is_child:
        worker.main()
    os._exit(0)


def _warm_up() -> None:
    """Import what every training imports sooner or later. Some of it torch imports with the first optimizer."""
    import torch
    import torch.distributed
    import torch.utils.data

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    gc.collect()
    gc.freeze()  # a collection would write to the memory that children share


def _can_fork() -> bool:
    """Whether a child could do everything: no other thread holds a lock, and no device's runtime has been woken."""
    if psutil.Process().num_threads() > 1:
        return False
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    spoilt = True
    try:
        spoilt = _is_spoilt()
    finally:
        os._exit(spoilt)


def _is_spoilt() -> bool:
    """Whether the runtime of this machine's accelerator refuses to work here, by its own word after a fork."""
    import torch

    from drivetrain import device_module

    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else device_module.module_of(accelerator)
    asks = getattr(module, "_is_in_bad_fork", None)
    return asks is not None and bool(asks())


def _serve(channel: socket.socket) -> bool:
    """Answer requests. Returns in every child, with True, and when the other side is gone, with False."""
    while True:
        request, files, _, _ = socket.recv_fds(channel, _NUMBER.size, 3)
        if not request:
            return False
        (pid,) = _NUMBER.unpack(request)
        if pid != _FORK:
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _redirect(files)
                return True
            os.setpgid(answer, answer)  # so that it can be ended with its children
            for file in files:
                os.close(file)
        channel.sendall(_NUMBER.pack(answer))


def _redirect(files: Sequence[int]) -> None:
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)


if __name__ == "__main__":
    main()
