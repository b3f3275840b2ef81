"""Replicas: one process for each device, started by torch_xla's own launcher, their gradients averaged over XLA.

``python -m drivetrain_xla.replicas PROCESSES MACHINE_RANK MACHINES {script|module} TARGET [ARGUMENT ...]`` is the
process that calls that launcher, so that the one who called ``drivetrain launch`` imports no engine.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.errors import ConfigError, DrivetrainError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from drivetrain.launch import LaunchPlan

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "average_gradients",
    "broadcast",
    "equalize",
    "launch",
    "main",
]

# ----------------------------------------------------------------------------------------------------------- launching


def launch(plan: LaunchPlan) -> int:
    """Start a process for each device by torch_xla, wait for them, and return the exit code.

    Core starts one process, as it does any, with signals and reports; that one calls torch_xla's launcher.

    Raises:
        ConfigError: The plan asks for what that launcher can't do.
    """
    if plan.no_python:
        raise ConfigError("torch_xla's launcher starts Python scripts only; leave --no_python out")
    if plan.max_restarts:
        raise ConfigError("torch_xla's launcher restarts nothing; leave max_restarts out")
    from drivetrain.launch.elastic import start

    numbers = (str(plan.processes), str(plan.machine_rank), str(plan.machines))
    target = ("module" if plan.module else "script", plan.script, *plan.script_args)
    return start(
        attrs.evolve(
            plan,
            script="drivetrain_xla.replicas",
            module=True,
            script_args=(*numbers, *target),
            processes=1,
            machines=1,
            machine_rank=0,
        )
    )


def main(arguments: Sequence[str]) -> None:
    """Call torch_xla's launcher; each replica then runs the script as any worker does."""
    import torch_xla

    processes, machine_rank, machines, *target = arguments
    torch_xla.launch(_replica, args=(int(processes), int(machine_rank), int(machines), tuple(target)))


def _replica(index: int, processes: int, machine_rank: int, machines: int, target: tuple[str, ...]) -> None:
    import torch_xla.runtime as xr

    from drivetrain.launch import worker
    from drivetrain.launch.environment import rank_environment

    if threading.current_thread() is not threading.main_thread() and xr.addressable_device_count() > 1:
        raise DrivetrainError(
            f"the {xr.device_type()} runtime drives {xr.addressable_device_count()} devices by threads of one process, "
            f"and a program for one device can't run twice in one. Use them by xla.spmd: true with num_processes: 1"
        )
    if xr.world_size() != processes * machines:
        raise DrivetrainError(
            f"{processes * machines} process(es) were planned, and the {xr.device_type()} runtime has started "
            f"{xr.world_size()}, one for each of its devices: num_processes: {xr.world_size() // machines} is what "
            f"fits, or num_processes: 1 with xla.spmd: true"
        )
    local_rank = index - machine_rank * processes
    os.environ.update(rank_environment(local_rank, processes, machine_rank, machines))
    sys.argv[:] = [worker.__file__, *target]
    worker.main()


# --------------------------------------------------------------------------------------------------------- collectives


def average_gradients(models: Iterable[nn.Module]) -> None:
    """Replace every gradient by its mean over all replicas."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    if gradients:
        xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1.0 / xr.world_size())


def equalize(model: nn.Module) -> None:
    """Give all replicas the parameters and buffers of the first."""
    import torch_xla.core.xla_model as xm

    xm.broadcast_master_param(model)


def all_gather(tensor: Tensor) -> Tensor:
    """Stacked tensors of all replicas: ``(size, *shape)``."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    return xm.all_gather(tensor.to(torch_xla.device()).unsqueeze(0)).to(tensor.device)


def all_reduce(tensor: Tensor, op: str) -> Tensor:
    """Sum, mean, maximum or minimum over all replicas."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    scale = 1.0 / xr.world_size() if op == "mean" else 1.0
    reduced = xm.all_reduce("sum" if op == "mean" else op, tensor.to(torch_xla.device()).clone(), scale=scale)
    return reduced.to(tensor.device)


def broadcast(tensor: Tensor, source: int) -> Tensor:
    """The tensor of one replica on all."""
    return all_gather(tensor)[source].to(tensor.dtype)


def all_gather_object(value: Any) -> list[Any]:
    """Picklable objects of all replicas."""
    import torch_xla.core.xla_model as xm

    return [pickle.loads(each) for each in xm.rendezvous("drivetrain.all_gather_object", pickle.dumps(value))]


if __name__ == "__main__":
    main(sys.argv[1:])
