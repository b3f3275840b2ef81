"""Precisions, most of them wrong, and backends that get along with none."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Capabilities, Policy, Precision, hookimpl


class Picky(Precision):
    """Works nowhere, and says why."""

    api = (1, 0)

    def refuses(self, capabilities: Capabilities, device_type: str) -> str | None:
        return "it wants a device from the future"


@fails("Freezing trains to a falling loss", "the loss does not fall on rank 0")
class Freezing(Precision):
    """Trains nothing."""

    api = (1, 0)

    @property
    def policy(self) -> Policy:
        return Policy(output=None)

    @hookimpl
    def convert_model(self, model: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0)
        return model


class Coarse(Precision):
    """Full precision, but for gradients on their way to other ranks."""

    api = (1, 0)

    @property
    def policy(self) -> Policy:
        return Policy(reduce="bfloat16", output=None)


@fails("Picky trains to a falling loss, or is refused", "a process group was made on rank 0", size=2)
class BeginsEarly(Right):
    """Makes the process group before it is known whether there will be a run."""

    api = (1, 0)

    @hookimpl
    def device(self, topology: Any) -> Any:
        import torch
        import torch.distributed as dist

        if topology.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        return torch.device("cpu")

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        from drivetrain.world import World

        return World(rank=topology.rank, size=topology.size, device=device, local_rank=topology.local_rank)
