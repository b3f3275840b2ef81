"""Where a process stands: what the launcher decided, what became of it, and the run built on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from drivetrain.binding import Hooks
    from drivetrain.config import RunConfig
    from drivetrain.plugin import Capabilities, Policy

__all__ = ["Run", "Topology", "World"]

# Environment variables of launchers, in the order in which they are believed. Each row:
# (rank, size, local rank, local size). torch.distributed.run's names are the lingua franca and come first.
_LAUNCHERS: Mapping[str, tuple[str, str, str, str]] = {
    "torch.distributed.run": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@attrs.frozen(kw_only=True)
class Topology:
    """What the launcher decided for this process, before any device or process group exists."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str | None = None
    master_port: int | None = None
    device_index: int | None = None
    """Number of the device this process was given (``gpu_ids``); None: that of its local rank."""
    launcher: str | None = None
    """Whose environment variables were read; None when nothing launched this process."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Topology:
        """Read the variables of torchrun, Open MPI, MVAPICH, MPICH or Slurm; one process if there are none.

        Raises:
            ConfigError: A variable is no number, or the rank is not below the size.
        """
        for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
            if rank not in environment or size not in environment:
                continue
            # An interactive Slurm shell (salloc) describes the allocation, not a step of it.
            if launcher == "Slurm" and "SLURM_STEP_ID" not in environment:
                continue

            def number(name: str, default: int) -> int:
                text = environment.get(name)
                if text is None or text == "":
                    return default
                try:
                    return int(text.split("(")[0])  # Slurm writes "2(x3)" for three equal nodes
                except ValueError:
                    raise ConfigError(f"environment variable {name}={text!r} is not a whole number") from None

            found = cls(
                rank=number(rank, 0),
                size=number(size, 1),
                local_rank=number(local_rank, number(rank, 0)),
                local_size=number(local_size, number(size, 1)),
                master_address=environment.get("MASTER_ADDR"),
                master_port=number("MASTER_PORT", 0) or None,
                launcher=launcher,
            )
            if not 0 <= found.rank < found.size:
                raise ConfigError(
                    f"environment variables {rank}={found.rank} and {size}={found.size} contradict each other: "
                    f"the rank must be below the size. They come from {launcher}."
                )
            return found
        return cls()


@attrs.frozen(kw_only=True, eq=False)
class World:
    """This process's place in the run. Collectives count processes (``size``), data counts shards (``data_size``)."""

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0
    local_size: int = 1
    data_rank: int = attrs.field(default=attrs.Factory(lambda self: self.rank, takes_self=True))
    """First data shard this process feeds."""
    data_size: int = attrs.field(default=attrs.Factory(lambda self: self.size, takes_self=True))
    """Data shards of the whole run: the data-parallel size. Loaders and schedulers use it."""
    feeds: int = 1
    """Data shards this process feeds. Above 1 where one process drives several devices."""
    collectives: str | None = None
    """Name of the communication library in use, such as ``"gloo"``; None without one."""
    data_group: Any = None
    """Process group of the data-parallel ranks; None: all of them."""
    mesh: Any = None
    """Device mesh, for backends that have one."""


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """All that a hook may want to know. The first argument of every hook called in a worker after ``init_world``."""

    config: RunConfig
    topology: Topology
    world: World
    policy: Policy
    capabilities: Capabilities
    names: Mapping[str, str]
    """Chosen plugin by role: ``{"backend": ..., "device": ..., "precision": ...}``."""
    hooks: Hooks
    """Calls any hook as core would, defaults included: ``run.hooks.unwrap(run=run, model=model)``."""
