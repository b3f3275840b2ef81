"""Values that a model had in more bits than the engine keeps: it rounds parameters before it copies master weights.

Trained parameters get their master weights from here, so that training starts from the user's values. Frozen ones have
none; each rank keeps a part of them in host memory, so that they come out of a checkpoint as they went in.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.world import Run
from drivetrain_backends.pieces import Piece
from drivetrain_deepspeed import partitions

__all__ = ["Frozen", "Originals", "update_frozen"]


@attrs.frozen(eq=False)
class Frozen:
    """A parameter that is not trained, and this rank's part of its values."""

    parameter: Any
    piece: Piece


@attrs.frozen(eq=False)
class Originals:
    """Copies in host memory, by parameter."""

    values: list[tuple[Any, Tensor]]

    @classmethod
    def of(cls, model: nn.Module, compute: torch.dtype | None) -> Originals:
        """Copy what the engine is going to round.

        Args:
            model: The user's. Parameters that are cut already were rounded when they were made.
            compute: Dtype the engine keeps parameters in; None: it leaves them.
        """
        if compute is None:
            return cls([])
        wide = [
            parameter
            for parameter in model.parameters()
            if parameter.dtype.itemsize > compute.itemsize
            and parameter.is_floating_point()
            and not hasattr(parameter, "ds_id")
        ]
        return cls([(parameter, parameter.detach().to("cpu", copy=True)) for parameter in wide])

    def hand_over(self, run: Run, zero: Any) -> dict[int, Frozen]:
        """Write them into the master weights; returns what is kept of the others, by the id of the parameter."""
        kept: dict[int, Frozen] = {}
        for parameter, value in self.values:
            # The values of rank 0 are everybody's, as the engine's are.
            value = run.hooks.broadcast(run=run, tensor=value.to(run.world.device), source=0, group=None).view(-1)
            found = partitions.slot(zero, parameter)
            if found is None:
                start, stop = _own_part(run, parameter, value.numel())
                part = value[start:stop].to("cpu", copy=True)
                kept[id(parameter)] = Frozen(parameter, Piece(part, start, _shape(parameter)))
            else:
                partitions.locate(zero, parameter).write(value[found.start : found.start + found.numel], found.start)
        return kept


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _own_part(run: Run, parameter: Any, numel: int) -> tuple[int, int]:
    """First and last but one element this rank keeps: those that stage 3 gives it, or as many at the other stages."""
    size = parameter.partition_numel() if hasattr(parameter, "ds_id") else -(-numel // run.world.size)
    rank = dist.get_rank(parameter.ds_process_group) if hasattr(parameter, "ds_id") else run.world.rank
    start = min(rank * size, numel)
    return start, min(start + size, numel)


@torch.no_grad()  # type: ignore[untyped-decorator]
def update_frozen(run: Run, frozen: dict[int, Frozen]) -> None:
    """Give frozen parameters the values of what ranks keep of them, after these were written. Every rank calls it."""
    for each in frozen.values():
        parameter, piece = each.parameter, each.piece
        if hasattr(parameter, "ds_id"):
            partitions.held(parameter).local.copy_(piece.local)
            continue
        part = torch.zeros(-(-parameter.numel() // run.world.size), dtype=piece.local.dtype, device=run.world.device)
        part[: piece.local.numel()].copy_(piece.local)
        everyone: Tensor = run.hooks.all_gather(run=run, tensor=part, group=None)
        parameter.data.copy_(everyone.view(-1)[: parameter.numel()].view(parameter.shape))
