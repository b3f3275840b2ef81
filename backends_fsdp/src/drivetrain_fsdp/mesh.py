"""How the ranks are arranged: in groups over which the model is cut, and in replicas of such a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.errors import ConfigError

__all__ = ["REPLICATE", "SHARD", "arrange", "make_mesh", "shard_group"]

REPLICATE, SHARD = "replicate", "shard"


def arrange(section: str, replicate: int | None, shard: int | None, size: int, least: int = 1) -> tuple[int, int]:
    """Number of replicas, and of ranks in each.

    Args:
        section: Of the configuration, for messages.
        replicate: As configured; None: what ``shard`` leaves, or 1.
        shard: As configured; None: what ``replicate`` leaves.
        size: Number of ranks.
        least: Fewest ranks a replica can be cut over.

    Raises:
        ConfigError: They do not multiply to the number of ranks, or a replica would have too few.
    """
    replicas = replicate or (1 if shard is None else max(1, size // shard))
    ranks = shard or max(1, size // replicas)
    said = ", ".join(
        f"{section}.{name}={value}"
        for name, value in (("replicate_size", replicate), ("shard_size", shard))
        if value is not None
    )
    if replicas > 1 and ranks < least:
        raise ConfigError(
            f"{said} leaves each of {size} processes a whole model, which {section} can't keep equal; cut it over "
            f"{least} or more, or use another backend"
        )
    if replicas * ranks != size:
        raise ConfigError(
            f"{said} can't be had with {size} processes: replicate_size times shard_size must be their number, and is "
            f"{replicas} x {ranks} = {replicas * ranks}"
        )
    return replicas, ranks


def make_mesh(device_type: str, replicas: int, ranks: int) -> DeviceMesh:
    """A mesh of one dimension, or of two if there are replicas."""
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicas, ranks), mesh_dim_names=(REPLICATE, SHARD))


def shard_group(mesh: Any) -> dist.ProcessGroup:
    """The process group over which this rank's pieces are cut."""
    return mesh.get_group(SHARD)
