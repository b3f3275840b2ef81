"""Bringing up the engine's runtime, and whether it is the world that the launcher planned."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.world import World
from drivetrain_xla.config import RUNTIME, XlaConfig
from drivetrain_xla.mesh import arrange, axis_sizes
from drivetrain_xla.pairing import check_pair
from drivetrain_xla.sharding import Sharding

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.world import Topology

__all__ = ["check_device_setting", "current_device", "memory", "start", "world"]

logger = logging.getLogger("drivetrain.xla")


def start(config: XlaConfig) -> None:
    """Import the engine and bring its runtime into the mode the section asks for.

    Raises:
        EngineError: torch and torch_xla do not fit.
        ConfigError: The process already has a runtime, of another kind or in another mode.
    """
    check_pair()
    import torch_xla.runtime as xr

    if config.runtime is not None:
        there = os.environ.get(RUNTIME)
        if there is not None and there != config.runtime:
            raise ConfigError(
                f"xla.runtime is {config.runtime}, and the environment variable {RUNTIME} is {there}; leave one of "
                f"them out"
            )
        if there is None:
            xr.set_device_type(config.runtime)
    if config.spmd:
        if not xr.is_spmd():
            xr.use_spmd()
    elif xr.is_spmd():
        raise ConfigError(
            "this process computes by SPMD already, which the engine can't take back; set xla.spmd: true, or start a "
            "new process"
        )
    if config.cpu_devices is not None and xr.global_runtime_device_count() != config.cpu_devices:
        raise ConfigError(
            f"xla.cpu_devices is {config.cpu_devices}, and the runtime has {xr.global_runtime_device_count()}; it "
            f"reads CPU_NUM_DEVICES when it starts: use `drivetrain launch`, or set that variable for the process"
        )
    if config.cache_dir is not None:
        _keep_graphs(config.cache_dir)


def _keep_graphs(folder: str) -> None:
    import torch_xla
    import torch_xla.runtime as xr

    if torch_xla._XLAC._xla_computation_cache_is_initialized():
        return  # by an earlier run of this process; the engine takes one folder
    xr.initialize_cache(folder)


def current_device(topology: Topology) -> torch.device:
    """The device of this process; under SPMD the one that stands for all of them.

    Raises:
        ConfigError: ``gpu_ids`` names a device there is not, or is used under SPMD.
    """
    import torch_xla
    import torch_xla.runtime as xr

    index = topology.device_index
    if index is None:
        return torch_xla.device()
    if xr.is_spmd():
        raise ConfigError("gpu_ids chooses one device for each process, and xla.spmd uses all; leave it out")
    count = xr.addressable_device_count()
    if index >= count:
        raise ConfigError(f"gpu_ids: {index} is no device of this process, which has {count}, numbered from 0")
    return torch_xla.device(index)


def check_device_setting(config: RunConfig) -> None:
    """Refuse a setting ``device`` that this backend would not follow.

    Raises:
        ConfigError: It names something else than what the runtime runs on.
    """
    import torch_xla.runtime as xr

    runtime = str(xr.device_type())
    if config.device not in ("auto", "torch") and config.device.upper() != runtime.upper():
        raise ConfigError(
            f"device: {config.device} contradicts backend xla, whose runtime is {runtime}; leave device out, and name "
            f"the runtime in xla.runtime or {RUNTIME}"
        )


def world(config: XlaConfig, topology: Topology) -> tuple[World, Sharding | None]:
    """Where this process stands in the runtime's world, and under SPMD how its devices divide the work.

    Raises:
        ConfigError: The mesh does not fit the devices.
        DrivetrainError: The runtime is another world than the plan.
    """
    import torch_xla
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    if config.spmd:
        _check_machines(topology, xr.process_count())
        sizes = axis_sizes(config.mesh, devices)
        sharding = Sharding(config, arrange(sizes), sizes)
        feeds = sharding.shards
        return World(
            rank=0, size=1, device=torch_xla.device(), data_size=feeds, feeds=feeds, mesh=sharding.mesh
        ), sharding
    _check_replicas(topology, xr.world_size(), devices)
    if topology.size == 1 and devices > 1:
        logger.warning("one of %d %s devices is used; xla.spmd: true uses all of them", devices, xr.device_type())
    return World(
        rank=xr.global_ordinal(),
        size=topology.size,
        device=current_device(topology),
        local_rank=topology.local_rank,
        local_size=topology.local_size,
        collectives="xla" if topology.size > 1 else None,
    ), None


def _check_machines(topology: Topology, processes: int) -> None:
    if topology.size == processes == 1:
        return
    raise DrivetrainError(
        f"xla.spmd: one process drives all devices of one machine, but {topology.size} were planned"
        f"{f' by {topology.launcher}' if topology.launcher else ''}, and the runtime has {processes}. Set "
        f"num_processes: 1; SPMD over several machines is not supported"
    )


def _check_replicas(topology: Topology, size: int, devices: int) -> None:
    """Two worlds of one train two models without a word: compare the runtime's with the plan."""
    if size == topology.size:
        return
    if devices == 1:
        fits = "num_processes: 1 is what fits"
    else:
        fits = (
            f"start {devices} processes by `drivetrain launch --num_processes {devices}`, which leaves that to "
            f"torch_xla's own launcher (torchrun starts strangers), or one with xla.spmd: true"
        )
    import torch_xla.runtime as xr

    raise DrivetrainError(
        f"{topology.launcher or 'the launcher'} planned {topology.size} process(es), and the {xr.device_type()} "
        f"runtime is a world of {size} with {devices} device(s). Each process would train a model of its own: {fits}"
    )


def memory(device: torch.device) -> dict[str, int]:
    """Bytes ``allocated``, ``peak`` and ``total``, where the runtime counts them."""
    import torch_xla.core.xla_model as xm

    try:
        counted = xm.get_memory_info(device)
    except RuntimeError:  # runtimes that do not count, the CPU's for one
        return {}
    names = {"allocated": "bytes_used", "peak": "peak_bytes_used", "total": "bytes_limit"}
    return {name: int(counted[theirs]) for name, theirs in names.items() if counted.get(theirs)}
