"""A worker of the pool: ``python -m drivetrain.testing.worker`` runs tasks that come over stdin until it is closed.

Every task starts from the same state: the process-wide state of the libraries is reset in between.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import queue
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from drivetrain.testing.messages import receive, send

_SEED = 0
_SOCKETS = (Path("/proc/net/tcp6"), Path("/proc/net/tcp"))
_HEAD_START = 5.0
"""Seconds after which torch is left to wait for rank 0 in its own way."""


def main() -> None:
    """Serve tasks."""
    parent, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The pipes are for this module alone: tasks read nothing, and what they print goes to the log.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    _meet_soon()
    tasks: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(parent, tasks), daemon=True).start()
    send(answers, pickle.dumps(("ready", None)))
    while True:
        _serve(tasks.get(), answers)


def _meet_soon() -> None:
    """Have ranks look for the store of rank 0 all the time until it is there.

    torch itself looks a second time after half a second, which is longer than most tasks take.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function of that name hides it
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None or not _SOCKETS[0].exists():
        return  # another torch, or not Linux: some tasks take longer

    def create_when_it_listens(host: str, port: int, rank: int, *rest: Any, **options: Any) -> Any:
        deadline = time.monotonic() + _HEAD_START
        while rank != 0 and not _listens(port) and time.monotonic() < deadline:
            time.sleep(0.002)
        return create(host, port, rank, *rest, **options)

    rendezvous._create_c10d_store = create_when_it_listens


def _listens(port: int) -> bool:
    """Whether a socket of this machine listens at a port. Trying to connect would tell too, but disturb the store."""
    sockets = (line.split() for table in _SOCKETS if table.exists() for line in table.read_text().splitlines())
    return any(fields[3] == "0A" and fields[1].endswith(f":{port:04X}") for fields in sockets)


def _listen(parent: BinaryIO, tasks: queue.Queue[dict[str, Any]]) -> None:
    """Take tasks; end this process, whatever it is doing, when the parent is gone."""
    while True:
        try:
            tasks.put(pickle.loads(receive(parent)))
        except EOFError:
            os._exit(0)


def _serve(task: Mapping[str, Any], answers: BinaryIO) -> None:
    environment, path, directory = dict(os.environ), list(sys.path), os.getcwd()
    faulthandler.dump_traceback_later(task["timeout"])  # into the log, for the parent to show
    error: BaseException | None = None
    try:
        with warnings.catch_warnings():
            _seed()
            content = pickle.dumps(("result", _execute(task)))
    except BaseException as raised:  # SystemExit and KeyboardInterrupt are answers too
        error = raised
        content = pickle.dumps(("error", _described(raised)))
    try:
        _reset(error)
    except Exception as raised:
        if error is None:
            content = pickle.dumps(("error", _described(raised)))
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        os.chdir(directory)
    send(answers, content)


def _execute(task: Mapping[str, Any]) -> Any:
    sys.path[:] = task["path"]
    os.chdir(task["directory"])
    os.environ.update(task["environment"])
    function: Any = _module(task["module"], task["file"])
    for name in task["function"].split("."):
        function = getattr(function, name)
    return function(*pickle.loads(task["args"]))


_MAIN = "__mp_main__"
"""What a program that starts workers is called in them, so that what it does as a program is not done again.

That is multiprocessing's name for it, by which the program itself finds its classes too.
"""


def _module(name: str, file: str | None) -> ModuleType:
    """The module of a task; by its file if it is a script or a test that no import by name finds."""
    if file is None:
        return importlib.import_module(name)
    if name == "__main__":
        name = _MAIN
    try:
        loaded = importlib.import_module(name)
    except ImportError:
        loaded = None
    if loaded is not None and _same_file(getattr(loaded, "__file__", None), file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it is run: its classes are pickled by this name
    if name == _MAIN:
        sys.modules["__main__"] = module  # and by this one, if the program pickled them
    spec.loader.exec_module(module)
    return module


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and Path(one).resolve() == Path(other).resolve()


def _described(error: BaseException) -> dict[str, Any]:
    return {
        "time": time.time(),
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def _seed() -> None:
    """Random numbers of a task must not depend on the tasks before it."""
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    import torch

    torch.manual_seed(_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _reset(error: BaseException | None) -> None:
    """Take down the run and the process group, so that the next task finds a process like a new one."""
    reset: Callable[[BaseException | None], None] | None = getattr(sys.modules.get("drivetrain.state"), "reset", None)
    try:
        if reset is not None:
            reset(error)
    finally:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        # torch numbers groups. One that failed on this rank alone must not make it look for the next ones elsewhere.
        dist.distributed_c10d._world.group_count = 0


if __name__ == "__main__":
    main()
