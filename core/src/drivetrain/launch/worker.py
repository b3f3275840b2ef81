"""What runs in each rank before the script: runs it exactly as Python would, and reports how it failed.

Started by its path, not by ``-m``: so the user's folder is not yet on ``sys.path`` when this file imports what it
needs, and nothing of the package is imported before the script imports it. Hence the standard library only.

Usage: ``python worker.py {script|module} TARGET [ARGUMENT ...]``. Reports go to the folder of ``DRIVETRAIN_RESOLVED``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import types
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any

__all__ = ["main"]

_REPORTED = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
"""Variables worth knowing when a rank failed. A choice, since the others may hold secrets."""

_OWN_FRAMES = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the script named on the command line, in this process, as ``__main__``."""
    kind, target, *arguments = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = os.path.dirname(os.environ.get("DRIVETRAIN_RESOLVED", ""))
    _die_with_launcher()
    _write_whole_lines()
    _keep_stack(folder, f"stack-{attempt}-{rank}.txt")
    try:
        (_run_module if kind == "module" else _run_script)(target, arguments)
    except BaseException as error:
        _end(error, folder, f"fault-{attempt}-{rank}.json")


def _die_with_launcher() -> None:
    """Ask Linux to end this rank if the launcher is killed so hard that it can't do so itself."""
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc or musl: only this comfort is missing
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM), 0, 0, 0)


def _write_whole_lines() -> None:
    """Write stdout line by line: soon enough to follow, and never half a line of one rank inside another's.

    Python run with ``-u`` or ``PYTHONUNBUFFERED`` writes every piece of a line by itself. A single process may; of
    several, each waits for the end of the line, unless the script flushes before.
    """
    options = {"line_buffering": True}
    if os.environ.get("WORLD_SIZE", "1") != "1":
        options["write_through"] = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # closed, or replaced by something that is no text file
            stream.reconfigure(**options)  # type: ignore[union-attr]


def _keep_stack(folder: str, name: str) -> None:
    """Have the interpreter write where it was when a signal such as SIGSEGV kills it."""
    if not folder or faulthandler.is_enabled():
        return
    with contextlib.suppress(OSError):  # a full disk: the rank runs all the same
        # Open for as long as the process lives, which is what faulthandler asks for.
        faulthandler.enable(file=open(os.path.join(folder, name), "w", encoding="utf-8"))  # noqa: SIM115


# ------------------------------------------------------------------------------------------ running as Python would


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or not _is_source(path):
        _set_first_path(None)
        runpy.run_path(path, run_name="__main__")
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    with open(path, "rb") as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    # Not `runpy.run_path`: it takes its `__main__` away when the script's last line has run, while threads, exit
    # handlers and processes started by "spawn" still look for it.
    module = types.ModuleType("__main__")
    module.__file__ = absolute
    module.__loader__ = SourceFileLoader("__main__", absolute)
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None, __package__=None)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _is_source(path: str) -> bool:
    """Whether a file is Python source, rather than compiled code or an archive with a ``__main__``."""
    import zipfile

    return not path.endswith(".pyc") and not zipfile.is_zipfile(path)


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv[:] = ["-m", *arguments]
    _set_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str | None) -> None:
    """Put what Python would have put there in front of ``sys.path``, where the folder of this file is now."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    if folder is not None:
        sys.path.insert(0, folder)


# ------------------------------------------------------------------------------------------------- ending and reporting


def _end(error: BaseException, folder: str, name: str) -> None:
    """End the process as Python would after ``error``, with a report of it left behind."""
    error.__traceback__ = trace = _for_readers(error)
    if isinstance(error, SystemExit):
        code = _exit_code(error)
        if code:
            _report(error, code, folder, name)
        raise error
    _report(error, 1, folder, name)
    if isinstance(error, KeyboardInterrupt):
        # The launcher says it in one line. Python ends by the signal, after its exit handlers.
        if not _debugging():
            sys.excepthook = _say_nothing
        raise error
    _tell(error, trace, folder, name)
    raise SystemExit(1)


def _debugging() -> bool:
    return os.environ.get("DRIVETRAIN_DEBUG", "").lower() not in ("", "0", "false", "no", "off")


def _tell(error: BaseException, trace: TracebackType | None, folder: str, name: str) -> None:
    """Print the traceback, by the hook that the script may have set.

    Of ranks that all fail alike, as by a setting that is wrong, one does; the others say so in a line.
    """
    twin = _twin(folder, name) if folder else None
    if twin is not None and _hook_is_usual():
        rank = os.environ.get("RANK")
        print(f"drivetrain: rank {rank} failed as rank {twin} did: {type(error).__name__}", file=sys.stderr)
        return
    try:
        sys.excepthook(type(error), error, trace)
    except Exception:
        traceback.print_exc()
        sys.__excepthook__(type(error), error, trace)


def _hook_is_usual() -> bool:
    """Whether the script left the hook alone. Torch's own only adds the rank."""
    hook = sys.excepthook
    return hook is sys.__excepthook__ or str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def _twin(folder: str, name: str) -> int | None:
    """The rank that reported the very same failure before this one did; None if none has."""
    told: dict[str, dict[str, Any]] = {}
    attempt = name.rpartition("-")[0]
    for path in glob.glob(os.path.join(glob.escape(folder), f"{attempt}-*.json")):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            told[os.path.basename(path)] = json.load(file)
    own = told.pop(name, None)
    if own is None:
        return None
    alike = [
        other for other in told.values() if all(other[key] == own[key] for key in ("type", "message", "traceback"))
    ]
    first = min(alike, key=lambda other: (other["time"], other["rank"]), default=own)
    return first["rank"] if (first["time"], first["rank"]) < (own["time"], own["rank"]) else None


def _say_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An ``excepthook`` for what is reported elsewhere."""


def _for_readers(error: BaseException) -> TracebackType | None:
    """The traceback without frames of this file and, for an error that the library raises on purpose, of the library.

    Such an error is about what the script did: its last frame is where the script called, right above the message.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FRAMES:
        trace = trace.tb_next
    errors = sys.modules.get("drivetrain.errors")
    if errors is None or not isinstance(error, errors.DrivetrainError) or _debugging():
        return trace
    step = calling = trace
    while step is not None:
        calling = calling if _of_library(step) else step
        step = step.tb_next
    if calling is not None:
        calling.tb_next = None
    if isinstance(error, errors.CollectiveError):
        error.__cause__ = None  # the communication library's, whose words are in the message
    return trace


def _of_library(step: TracebackType) -> bool:
    """Whether a frame is ours, a member's, or of the context managers between them and the script."""
    top = str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    return top in ("drivetrain", "contextlib") or top.startswith("drivetrain_")


def _exit_code(error: SystemExit) -> int:
    """What the shell sees after ``sys.exit(value)``."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _report(error: BaseException, exit_code: int, folder: str, name: str) -> None:
    """Leave a report for the launcher. It must be there before this process can have ended."""
    if not folder:
        return
    shown = (
        ""
        if isinstance(error, SystemExit)
        else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    )
    report: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "exit_code": exit_code,
        "type": type(error).__name__,
        "message": _text(error),
        "place": _place(error.__traceback__),
        "traceback": "" if isinstance(error, SystemExit) else "".join(shown),
        "environment": {key: os.environ[key] for key in _REPORTED if key in os.environ},
    }
    path = os.path.join(folder, name)
    try:
        with open(f"{path}.part", "w", encoding="ascii") as file:
            json.dump(report, file)
        os.replace(f"{path}.part", path)
    except OSError as trouble:
        print(f"drivetrain: rank {report['rank']} could not leave a report of its failure: {trouble}", file=sys.stderr)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as trouble:
        return f"<its text can't be had: {type(trouble).__name__}>"


def _place(trace: TracebackType | None) -> str:
    """The innermost line of a traceback, as ``file:line in function``."""
    frames = traceback.extract_tb(trace)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


if __name__ == "__main__":
    main()
