"""What the engine keeps once for a process: its accelerator, its view of the process group, its logger."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from drivetrain.errors import ConfigError
from drivetrain.world import Run, World

__all__ = ["enter", "leave", "refused_dtype", "told_local_rank"]

_SHARED_MEMORY = "deepspeed_shm_comm"
"""The engine's name for its own collectives on the CPU."""
_LOGGERS = ("DeepSpeed", "deepspeed")


def enter(world: World, log_level: str | None) -> None:
    """Point the engine at the run's device and process group.

    Raises:
        ConfigError: It serves another kind of device.
    """
    _quiet(log_level)
    import deepspeed

    _serve(world.device.type)
    # Its collectives in shared memory know no timeout: with them, ranks would wait for a lost one for ever.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    deepspeed.init_distributed(
        dist_backend=world.collectives, auto_mpi_discovery=False, verbose=False, dist_init_required=None
    )


def _quiet(log_level: str | None) -> None:
    """Every rank would report every detail; that is for those who ask for it."""
    level = logging.DEBUG if log_level == "debug" else logging.WARNING
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level)


def _serve(device_type: str) -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator

    found = get_accelerator().device_name()
    if found == device_type:
        return
    if device_type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
        return
    raise ConfigError(
        f"the engine serves {found!r} devices in this process, and the run is on {device_type!r}; set the environment "
        f"variable DS_ACCELERATOR to the engine's name for it before starting"
    )


def leave() -> None:
    """Let go of process groups, so that another run in this process makes its own."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init, InsertPostInitMethodToModuleSubClasses
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    # Ranks compare the numbers of their parameters and modules, and those of the next run may have had other runs.
    Init.param_id = 0
    counters: Any = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counters[0][0] = 0
    # Stage 3 puts its own product into torch, for good. It computes gradients in another order, and stages 1 and 2
    # reduce them in the order they come: ranks of which only some had been at stage 3 would mix up weights and biases.
    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk


def refused_dtype(compute: str | None, device_type: str) -> str | None:
    """Why the engine can't compute in a dtype on a type of device; None if it can."""
    if compute != "float16":
        return None
    _quiet(None)
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == device_type and not get_accelerator().is_fp16_supported():
        return f"the engine says that float16 is not supported on this {device_type} device; use bf16, or zero_stage: 0"
    return None


@contextlib.contextmanager
def told_local_rank(run: Run) -> Iterator[None]:
    """Context in which the engine finds its device: it looks for LOCAL_RANK, which not every launcher sets."""
    device: Any = run.world.device
    number = str(run.world.local_rank if device.index is None else device.index)
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = number
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
