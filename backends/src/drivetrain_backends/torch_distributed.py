"""The backend that others subclass: the world and the collectives of torch.distributed, as hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drivetrain.plugin import Backend, Check, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drivetrain.config import RunConfig
    from drivetrain.world import Run, Topology, World

__all__ = ["TorchDistributedBackend"]


class TorchDistributedBackend(Backend):
    """A process group and its collectives. What is done with the model is up to the subclass."""

    requires: ClassVar[tuple[str, ...]] = ("torch>=2.9",)

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._device_type: str | None = None
        self._owns_group = False

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Whether torch can communicate at all, and over what."""
        from drivetrain_backends import checks

        return checks.torch_distributed()

    # ----------------------------------------------------------------------------------------------------- the world

    @hookimpl
    def init_world(self, config: RunConfig, topology: Topology, device: torch.device, collectives: str | None) -> World:
        """Make the process group, or adopt the one the user made."""
        from drivetrain_backends import process_group

        self._device_type = device.type
        world, self._owns_group = process_group.enter(config, topology, device, collectives)
        return world

    @hookimpl
    def shutdown(self, run: Run, error: BaseException | None) -> None:
        """Wait for the other ranks if all went well, then destroy the process group if it is this run's own."""
        from drivetrain_backends import process_group

        if self._owns_group:
            self._owns_group = False
            process_group.leave(run, error)

    # --------------------------------------------------------------------------------------------------- collectives

    @hookimpl
    def all_gather(self, run: Run, tensor: Tensor, group: Any) -> Tensor:
        """Stack the tensors of all ranks; any dtype, any layout."""
        from drivetrain_backends import collectives

        return collectives.all_gather(run, tensor, group)

    @hookimpl
    def all_reduce(self, run: Run, tensor: Tensor, op: Literal["sum", "mean", "max", "min"], group: Any) -> Tensor:
        """Reduce elementwise; sums and means of half-precision tensors are accumulated in float32."""
        from drivetrain_backends import collectives

        return collectives.all_reduce(run, tensor, op, group)

    @hookimpl
    def broadcast(self, run: Run, tensor: Tensor, source: int, group: Any) -> Tensor:
        """A new tensor with the source's values; ``source`` is a rank of the world, not of the group."""
        from drivetrain_backends import collectives

        return collectives.broadcast(run, tensor, source, group)

    @hookimpl
    def broadcast_object(self, run: Run, value: Any, source: int, group: Any) -> Any:
        """The source's picklable object; ``source`` is a rank of the world, not of the group."""
        from drivetrain_backends import collectives

        return collectives.broadcast_object(run, value, source, group)

    @hookimpl
    def all_gather_object(self, run: Run, value: Any, group: Any) -> list[Any]:
        """Picklable objects of all ranks."""
        from drivetrain_backends import collectives

        return collectives.all_gather_object(run, value, group)

    @hookimpl
    def barrier(self, run: Run, group: Any) -> None:
        """Wait for all ranks, no longer than the collective timeout."""
        from drivetrain_backends import collectives

        collectives.barrier(run, group)
