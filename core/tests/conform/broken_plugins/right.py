"""A backend that is right, of which most that are wrong are children."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import attrs

from drivetrain.errors import ConfigError
from drivetrain.plugin import Backend, Capabilities, hookimpl


class Right(Backend):
    """Replicates the model over processes, with nothing but torch.distributed."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, resharding=True)

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        from datetime import timedelta

        import torch.distributed as dist

        from drivetrain.world import World

        if topology.size > 1:
            dist.init_process_group(collectives, timeout=timedelta(seconds=30))
        return World(rank=topology.rank, size=topology.size, device=device, local_rank=topology.local_rank)

    @hookimpl
    def shutdown(self, run: Any, error: Any) -> None:
        import torch.distributed as dist

        if run.world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        trained = any(parameter.requires_grad for parameter in model.parameters())
        return DistributedDataParallel(model) if run.world.size > 1 and trained else model

    @hookimpl
    def unwrap(self, model: Any) -> Any:
        return getattr(model, "module", model)

    @hookimpl
    def accumulate(self, run: Any, models: Any, last: bool) -> Any:
        stack = contextlib.ExitStack()
        for model in models:
            if not last and hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        return stack

    @hookimpl
    def all_gather(self, run: Any, tensor: Any, group: Any) -> Any:
        import torch
        import torch.distributed as dist

        if run.world.size == 1:
            return torch.stack([tensor])
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(run.world.size)]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Literal["sum", "mean", "max", "min"], group: Any) -> Any:
        parts = self.all_gather(run, tensor, group)
        if op in ("max", "min"):
            return getattr(parts, f"a{op}")(dim=0)
        return getattr(parts, op)(dim=0, dtype=tensor.dtype)

    @hookimpl
    def broadcast(self, run: Any, tensor: Any, source: int, group: Any) -> Any:
        return self.all_gather(run, tensor, group)[source]

    @hookimpl
    def broadcast_object(self, run: Any, value: Any, source: int, group: Any) -> Any:
        return self.all_gather_object(run, value, group)[source]

    @hookimpl
    def all_gather_object(self, run: Any, value: Any, group: Any) -> list[Any]:
        import torch.distributed as dist

        if run.world.size == 1:
            return [value]
        parts: list[Any] = [None] * run.world.size
        dist.all_gather_object(parts, value, group=group)
        return parts

    @hookimpl
    def barrier(self, run: Any, group: Any) -> None:
        self.all_gather_object(run, None, group)


@attrs.frozen
class Sizes:
    """The numbers of processes that a backend takes."""

    sizes: list[int] = attrs.field(factory=list, metadata={"help": "numbers of processes"})


class Fussy(Right):
    """Right, with the numbers of processes that its section names."""

    api = (1, 0)
    Config = Sizes

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        if topology.size not in self.config.sizes:
            raise ConfigError(f"{topology.size} processes are none of {self.config.sizes}")
        return super().init_world(topology, device, collectives)
