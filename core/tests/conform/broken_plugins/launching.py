"""Wrong in how they launch."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails

from drivetrain.plugin import Backend, hookimpl


@fails("the exit code of a rank is passed on", "expected 7, got 0")
@fails("a rank that raises ends all ranks", "the exit code is 0")
class AlwaysFine(Backend):
    """Its launcher takes every end for a good one."""

    api = (1, 0)

    @hookimpl
    def launch(self, plan: Any) -> int:
        from drivetrain.launch.elastic import start

        start(plan)
        return 0


@fails("a launched training ends with exit code 0", "processes left behind")
class LeavesAChild(Backend):
    """Its launcher starts a process that nobody ends."""

    api = (1, 0)

    @hookimpl
    def launch(self, plan: Any) -> int:
        import subprocess
        import sys

        from drivetrain.launch.elastic import start

        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], **quiet)
        return start(plan)
