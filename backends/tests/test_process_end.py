"""How a process ends that has communicated: not by the library's threads, however late those get to run."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each fork runs through the interpreter's whole end. The library's threads get no time while anything else wants it.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from drivetrain import defaults
from drivetrain.binding import Hooks, Origin
from drivetrain.config import RunConfig
from drivetrain.plugin import Capabilities, Policy
from drivetrain.world import Run, Topology
from drivetrain_backends import TorchDistributedBackend, process_group

class Ground(TorchDistributedBackend):
    api = (1, 0)

def is_child():
    for _ in range(16):
        child = os.fork()
        if child == 0:
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            sys.exit(f"a process ended with {code}")
    return False

if is_child():
    torch.set_num_threads(1)
    hooks = Hooks(defaults)
    hooks.register(Ground(), Origin("backend", "ground"))
    config, topology = RunConfig(collective_timeout=20.0), Topology()
    world = hooks.init_world(config=config, topology=topology, device=torch.device("cpu"), collectives="gloo")
    run = Run(config=config, topology=topology, world=world, policy=Policy(), capabilities=Capabilities(), names={},
              hooks=hooks)
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    kept = dist.group.WORLD  # as a replicated model keeps it
    dist.all_reduce(torch.zeros(1))
    {leave}
"""


def ends(leave: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("{leave}", leave)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are given their scheduling class by Linux's means")
def test_a_communication_library_whose_threads_are_late_does_not_abort_the_process() -> None:
    done = ends("process_group.leave(run, SystemExit())")
    assert (done.returncode, done.stderr) == (0, "")
