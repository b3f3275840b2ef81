"""Examine what is installed: every plugin in a process of its own, so that one which crashes or hangs becomes a row.

``drivetrain doctor`` prints the rows. The worker half of this module runs in the examined process and imports neither
torch nor, beyond the plugin it examines, any other.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from drivetrain import discovery
from drivetrain.discovery import CORE, Entry
from drivetrain.plugin import Check, Device, Plugin

__all__ = ["Row", "examine", "examine_all", "general_rows"]

_MOST_ROWS = 100
"""A plugin may give that many rows; an endless generator must not fill the disk until the timeout."""
_KEPT = 2000
"""Characters of a dead process's last output that its row shows at most."""

_running: set[subprocess.Popen[bytes]] = set()
"""Examined processes that have not ended."""

# The worker sees exactly the modules its parent sees, whatever the current directory holds.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(chr(10)); "
    "from drivetrain.doctor import worker; worker(*sys.argv[1:])"
)


@attrs.frozen
class Row:
    """One finding of the doctor."""

    subject: str
    """What was examined, such as ``backend 'single' (drivetrain 0.1.0)``."""
    check: Check

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values, for JSON."""
        return {"subject": self.subject, **attrs.asdict(self.check)}


def examine_all(timeout: float) -> Generator[Row, None, None]:
    """Everything the doctor knows to look at: what is common to all plugins, then each plugin.

    Rows come as soon as they and all before them are known. Whoever does not want the rest closes the iterator: what is
    examined then is killed, however long it would take.

    Args:
        timeout: Seconds that each examined process may take.
    """
    entries = [entry for names in discovery.entries().values() for each in names.values() for entry in each]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        examined = [pool.submit(general_rows, timeout), *(pool.submit(examine, entry, timeout) for entry in entries)]
        try:
            for rows in examined:
                yield from rows.result()
        except BaseException:
            _abandon(examined)
            raise


def _abandon(examined: Sequence[Future[Any]]) -> None:
    """End all that is being examined."""
    for future in examined:
        future.cancel()
    while not all(future.done() for future in examined):
        for process in tuple(_running):
            _kill_group(process)
        time.sleep(0.05)  # one that was about to be started is met in the next round


# ------------------------------------------------------------------------------------------------- one plugin, outside


def examine(entry: Entry, timeout: float) -> list[Row]:
    """Load one plugin and run its checks in a process of its own.

    Args:
        entry: Which plugin.
        timeout: Seconds after which the process, and all it started, is killed.
    """
    fix = f"pip install --upgrade {entry.distribution}, or uninstall it"
    return [Row(str(entry), check) for check in _run_worker([entry.role, entry.qualified], timeout, fix)]


def _run_worker(
    arguments: list[str], timeout: float, fix: str, environment: Mapping[str, str] | None = None
) -> list[Check]:
    """The checks a worker wrote, and one more if it did not come to its end."""
    from drivetrain.launch.elastic import run_folder

    with run_folder() as folder:
        report = folder / "rows.jsonl"
        command = [sys.executable, "-c", _BOOTSTRAP, "\n".join(sys.path), str(report), *arguments]
        ended, output = _run(command, timeout, environment)
        lines = report.read_text("utf-8").splitlines() if report.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last line of a killed writer may be cut
    checks = [Check(**row) for row in rows if "done" not in row]
    if not any("done" in row for row in rows):
        checks.append(Check("process", False, f"{ended}{_last_words(output)}", fix))
    return checks


def _run(command: list[str], timeout: float, environment: Mapping[str, str] | None) -> tuple[str, str]:
    """Run a command in a process group of its own; how it ended, in words, and the end of its output."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    _running.add(process)
    output = bytearray()
    reader = threading.Thread(target=_keep_end, args=(process.stdout, output), daemon=True)
    reader.start()
    try:
        ended = _ending(process.wait(timeout))
    except subprocess.TimeoutExpired:
        ended = f"did not finish in {timeout:g} s"
    finally:
        _kill_group(process)
        _running.discard(process)
    reader.join(1.0)  # a process that left the group may hold the pipe open; its output is not waited for
    return ended, bytes(output).decode("utf-8", "replace")


def _keep_end(stream: Any, output: bytearray) -> None:
    """Read a pipe to its end, so that the writer never blocks, and keep what came last."""
    while chunk := stream.read1(65536):
        output += chunk
        del output[:-_KEPT]
    stream.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):
        pass  # all of it has ended
    process.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} before its checks did"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _last_words(output: str) -> str:
    return f"; its last output:\n{output.strip()}" if output.strip() else ""


# -------------------------------------------------------------------------------------------------- one plugin, inside


def worker(report: str, role: str, name: str = "") -> None:
    """Entry point of the examined process: write checks to a file, a line each as they come, and one at the end.

    Args:
        report: The file. Not the standard output, on which a plugin may print.
        role: Role of the plugin, or ``torch`` to examine torch itself.
        name: Name of the plugin in full.
    """
    import faulthandler

    faulthandler.enable()
    checks = _torch_checks() if role == "torch" else _plugin_checks(role, name)
    with open(report, "w", encoding="utf-8") as file:
        for count, check in enumerate(checks):
            if count == _MOST_ROWS:
                check = Check(
                    "checks", False, f"gives more than {_MOST_ROWS} rows", "report it to the plugin's authors"
                )
            file.write(json.dumps(attrs.asdict(check)) + "\n")
            file.flush()
            if count == _MOST_ROWS:
                break
        file.write('{"done": true}\n')
    sys.stdout.flush()
    os._exit(0)  # what a vendor's library does at exit is not examined, and may hang


def _plugin_checks(role: str, name: str) -> Iterator[Check]:
    from drivetrain import registry
    from drivetrain.errors import EngineError

    try:
        plugin = registry.load(registry.find(role, name))
    except EngineError as error:  # no fault: few people have the engine of every plugin that came along
        yield Check("engine", None, str(error))
        return
    except Exception as error:
        yield Check("load", False, str(error), f"pip install --upgrade {name.partition(':')[0]}, or uninstall it")
        return
    if not issubclass(plugin, Plugin):
        yield Check("load", True)
        yield from _tracker_checks(plugin)
        return
    yield Check("load", True, f"API {plugin.api[0]}.{plugin.api[1]}")
    if issubclass(plugin, Device) and not plugin.generic:
        yield from _guarded("present", lambda: [Check("present", None, _presence(plugin))])
    yield from _guarded("checks", plugin.checks)


def _presence(device: type[Device]) -> str:
    """What ``device: auto`` finds of it."""
    if getattr(device.present, "__func__", None) is getattr(Device.present, "__func__"):  # noqa: B009
        return "not looked for: used only where settings name it"
    return f"yes, {device.label}" if device.present() else f"no {device.label} found here"


def _tracker_checks(tracker: type) -> Iterator[Check]:
    """Whether a class is a tracker, and its engine there. One that isn't is no fault: few people use all of them."""
    from drivetrain.requirements import unmet
    from drivetrain.tracking import GeneralTracker

    if not issubclass(tracker, GeneralTracker) or not isinstance(getattr(tracker, "name", None), str):
        yield Check("tracker", False, "is no subclass of drivetrain.tracking.GeneralTracker that has a name")
        return
    if tracker.requires:
        missing = unmet(tracker.requires)
        found = f"{'; '.join(missing)}" if missing else ", ".join(tracker.requires)
        fix = f"to use it: pip install {' '.join(map(repr, tracker.requires))}" if missing else ""
        yield Check("engine", None if missing else True, found, fix)
    yield from _guarded("checks", tracker.checks)


def _guarded(name: str, checks: Any) -> Iterator[Check]:
    """Checks that a plugin gives, and a bad one if it raises or gives something else."""
    try:
        for check in checks():
            if not isinstance(check, Check) or check.ok not in (True, False, None):
                raise TypeError(f"a row must be a drivetrain.plugin.Check with ok True, False or None, not {check!r}")
            yield Check(
                str(check.name), check.ok if check.ok is None else bool(check.ok), str(check.detail), str(check.fix)
            )
    except (Exception, SystemExit) as error:
        yield Check(name, False, f"raised {type(error).__name__}: {error}", "report it to the plugin's authors")


def _torch_checks() -> Iterator[Check]:
    import torch

    yield Check("import", True, f"torch {torch.__version__}")
    built_for = torch.accelerator.current_accelerator()
    usable = torch.accelerator.current_accelerator(check_available=True)
    if usable is not None:
        yield Check("accelerator", True, f"{torch.accelerator.device_count()} x {usable.type}")
    elif built_for is not None:
        yield Check("accelerator", None, f"built for {built_for.type}, but finds no usable device; runs on the CPU")
    else:
        yield Check("accelerator", None, "none; runs on the CPU")


# --------------------------------------------------------------------------------------------- common to all plugins


def general_rows(timeout: float) -> list[Row]:
    """Rows on Python, torch, versions of our distributions, unreadable metadata, clashing names and unused hardware."""
    torch_checks = _examine_torch(timeout)
    found_accelerator = any(check.name == "accelerator" and check.ok for check in torch_checks)
    return [
        Row("python", Check("version", sys.version_info >= (3, 10), f"{platform.python_version()}, {sys.executable}")),
        *(Row("torch", check) for check in torch_checks),
        *_lockstep_rows(),
        *(Row("metadata", Check("readable", False, problem, "reinstall it")) for problem in discovery.problems()),
        *_clash_rows(),
        *([] if found_accelerator else _hardware_rows()),
    ]


def _examine_torch(timeout: float) -> list[Check]:
    """Torch's own checks. When its import fails, try without the vendor code that torch loads into every program."""
    checks = _run_worker(["torch"], timeout, "reinstall torch")
    if any(check.name == "import" for check in checks):
        return checks
    again = _run_worker(["torch"], timeout, "", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    if not any(check.name == "import" for check in again):
        return checks
    loaded = importlib.metadata.entry_points(group="torch.backends")
    names = ", ".join(sorted(f"{point.name} = {point.value}" for point in loaded)) or "none in sight"
    fix = "uninstall or upgrade the one that breaks it; until then set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    detail = (
        f"import torch works only without the device backends that it loads by itself ({names}). {checks[-1].detail}"
    )
    return [Check("import", False, detail, fix)]


def _lockstep_rows() -> Iterable[Row]:
    """A row for each of our distributions whose version is not core's: they are released, and work, together."""
    from drivetrain.requirements import installed_version, members

    core = installed_version(CORE)
    if core is None:
        from drivetrain import __version__

        yield Row(CORE, Check("version", None, f"{__version__}, imported from a source tree; not installed"))
        return
    yield Row(CORE, Check("version", True, core))
    for member in members():
        version = installed_version(member)
        if version is not None:
            fix = "" if version == core else f"pip install --upgrade {CORE} {member}"
            yield Row(member, Check("version", version == core, f"{version}, {CORE} is {core}", fix))


def _clash_rows() -> Iterable[Row]:
    for role, names in discovery.entries().items():
        for name, providers in names.items():
            if len(providers) > 1:
                who = ", ".join(f"{entry.distribution} {entry.version}" for entry in providers)
                fix = f"uninstall one, or name it in full, such as {providers[0].qualified}"
                yield Row(f"{role} {name!r}", Check("name", False, f"provided by {who}", fix))


def _hardware_rows(root: str = "/") -> Iterable[Row]:
    """A hint where the kernel shows accelerators that torch does not use: a plugin or a driver may be missing."""
    nodes = sorted(Path(root, "sys/class/accel").glob("accel*")) + sorted(Path(root, "dev/dri").glob("renderD*"))
    if nodes:
        names = ", ".join(node.name for node in nodes)
        detail = f"the kernel shows {names}, but torch uses no accelerator"
        yield Row("hardware", Check("unused", None, detail, "its vendor's torch or device plugin may be missing"))
