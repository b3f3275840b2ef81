"""Tensors of which each rank holds a piece: where the pieces lie, and how a whole is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.checkpoint.pieces import Layout, Part, Piece
from drivetrain.errors import DrivetrainError
from drivetrain.world import Run

__all__ = ["Layout", "Part", "Piece", "gather", "piece_of", "plain", "survey"]


def plain(tensor: Tensor) -> Tensor:
    """The memory behind a tensor: its own, or that of the one tensor a wrapper keeps its values in."""
    while is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        values = [candidate for candidate in inner if candidate.shape == tensor.shape]
        if len(values) != 1:
            raise DrivetrainError(f"a {type(tensor).__name__} keeps its values in a way that can't be taken apart")
        tensor = values[0]
    return tensor.detach()


def piece_of(tensor: Tensor) -> Piece:
    """What this rank holds of a DTensor sharded over its first dimension; for other tensors the whole."""
    if not isinstance(tensor, DTensor):
        return Piece(plain(tensor), 0, tuple(tensor.shape))
    shape = tuple(tensor.shape)
    local = plain(tensor.to_local())
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded:
        return Piece(local, 0, shape)
    dim = sharded[0]
    if len(sharded) > 1 or not tensor.placements[dim].is_shard(0):
        raise DrivetrainError(f"only tensors cut once, along their first dimension, are known; got {tensor.placements}")
    rows = -(-shape[0] // tensor.device_mesh.size(dim))  # as torch.chunk: the last ranks may hold less, or nothing
    first = min(tensor.device_mesh.get_local_rank(dim) * rows, shape[0])
    return Piece(local, first * math.prod(shape[1:]), shape)


def survey(run: Run, pieces: Mapping[str, Piece]) -> dict[str, Layout]:
    """Where the pieces of every tensor are. Every rank calls it, also one that holds nothing of some tensors.

    Returns:
        By name, the same on all ranks and in the same order.

    Raises:
        DrivetrainError: Ranks disagree about a tensor, or nobody holds some of it; raised on all of them.
    """
    mine = {name: (piece.start, piece.stop, piece.shape, piece.local.dtype) for name, piece in pieces.items()}
    everyone = run.hooks.all_gather_object(run=run, value=mine, group=None)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    return {name: _layout(name, [theirs.get(name) for theirs in everyone]) for name in names}


def _layout(name: str, held: Sequence[Any]) -> Layout:
    kinds = {(shape, dtype) for _, _, shape, dtype in filter(None, held)}
    if len(kinds) != 1:
        raise DrivetrainError(
            f"ranks hold pieces of different tensors under the name {name!r}: {sorted(map(str, kinds))}"
        )
    [(shape, dtype)] = kinds
    parts: dict[tuple[int, int], Part] = {}
    for rank, piece in enumerate(held):
        if piece is not None and piece[0] < piece[1]:
            parts.setdefault((piece[0], piece[1]), Part(piece[0], piece[1], rank))
    ordered = tuple(parts[key] for key in sorted(parts))
    bounds = [0, *(part.stop for part in ordered)]
    if [part.start for part in ordered] != bounds[:-1] or bounds[-1] != math.prod(shape):
        raise DrivetrainError(f"the pieces of {name!r} of shape {shape} leave gaps or overlap: {ordered}")
    return Layout(shape, dtype, ordered)


def gather(
    run: Run, pieces: Mapping[str, Piece], layouts: Mapping[str, Layout], group: Any = None
) -> Iterator[tuple[str, Tensor]]:
    """Make tensors whole on rank 0, one after the other. Every rank must exhaust it.

    Args:
        run: The run.
        pieces: What this rank holds.
        layouts: What :func:`survey` said.
        group: Process group over which tensors are cut, if not over all ranks. The first one starts with rank 0.

    Yields:
        Name and whole, on the CPU with memory of its own. Nothing on other ranks.
    """
    members = list(range(run.world.size)) if group is None else dist.get_process_group_ranks(group)
    for name, layout in layouts.items():
        whole = _whole(run, pieces.get(name), layout, group, members)
        if run.world.rank == 0:
            yield name, whole.view(layout.shape)


def _whole(run: Run, piece: Piece | None, layout: Layout, group: Any, members: Sequence[int]) -> Tensor:
    if all(part.rank == 0 for part in layout.parts):  # nothing to be sent
        held = torch.empty(0, dtype=layout.dtype) if piece is None else piece.read()
        return held.to("cpu", copy=True)
    longest = max(part.stop - part.start for part in layout.parts)
    sent = torch.zeros(longest, dtype=layout.dtype, device=run.world.device)
    if piece is not None:
        sent[: piece.local.numel()].copy_(piece.read())
    received = run.hooks.all_gather(run=run, tensor=sent, group=group)
    if run.world.rank != 0:
        return sent
    return torch.cat([received[members.index(p.rank), : p.stop - p.start].cpu() for p in layout.parts])
