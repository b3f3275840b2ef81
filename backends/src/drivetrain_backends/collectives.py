"""Collectives that take any dtype and layout, leave their argument alone and explain their failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import CollectiveError
from drivetrain.world import Run

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "first_line",
]

# torch 2.13 renames it and deprecates the old name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What every communication library carries. Other dtypes travel as bytes, and are widened to be reduced.
_CARRIED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather(run: Run, tensor: Tensor, group: Any = None) -> Tensor:
    """Stack the tensors of all ranks of the group in rank order.

    Args:
        run: The run, for messages.
        tensor: Same shape and dtype on every rank. Any dtype, contiguous or not, 0-d and empty too.
        group: Process group; None: all ranks.

    Returns:
        A new tensor of shape ``(size, *tensor.shape)``, detached from the graph.

    Raises:
        CollectiveError: A rank did not answer.
    """
    size = dist.get_world_size(group)
    flat = _as_carried(tensor)
    gathered = flat.new_empty(size * flat.numel())
    if flat.numel() > 0:
        with _explained(run, "all_gather", group):
            _all_gather_flat(gathered, flat, group=group)
    return gathered.view(tensor.dtype).view(size, *tensor.shape)


def all_reduce(run: Run, tensor: Tensor, op: Literal["sum", "mean", "max", "min"], group: Any = None) -> Tensor:
    """Reduce elementwise over all ranks of the group.

    Sums and means of dtypes below 32 bits are accumulated in float32, so that they neither overflow on the way nor
    depend on the order of the ranks more than a float32 does. A sum of booleans counts, as ``torch.sum`` does.

    Args:
        run: The run, for messages.
        tensor: Same shape and dtype on every rank. It is left as it is.
        op: ``"mean"`` needs a floating-point or complex tensor.
        group: Process group; None: all ranks.

    Returns:
        A new tensor, the same on each rank; of the argument's dtype, int64 for the sum of booleans.

    Raises:
        CollectiveError: A rank did not answer.
        TypeError: The mean of integers was asked for.
    """
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"the mean of {tensor.dtype} tensors is not of that dtype; convert them to float first")
    reduced = tensor.detach().to(_reduction_dtype(tensor.dtype, op), copy=True, memory_format=torch.contiguous_format)
    if reduced.numel() > 0:
        with _explained(run, f"all_reduce ({op})", group):
            dist.all_reduce(reduced, op=_OPS[op], group=group)
    if op == "mean":
        reduced.div_(dist.get_world_size(group))
    counted = op == "sum" and tensor.dtype == torch.bool
    return reduced if counted else reduced.to(tensor.dtype)


def broadcast(run: Run, tensor: Tensor, source: int, group: Any = None) -> Tensor:
    """The source's values on every rank of the group.

    Args:
        run: The run, for messages.
        tensor: On the source the value, elsewhere any tensor of its shape and dtype. It is left as it is.
        source: Rank in the world, also where a group is given.
        group: Process group; None: all ranks.

    Raises:
        CollectiveError: A rank did not answer.
    """
    flat = _as_carried(tensor).clone()
    if flat.numel() > 0:
        with _explained(run, f"broadcast from rank {source}", group):
            dist.broadcast(flat, src=source, group=group)
    return flat.view(tensor.dtype).view(tensor.shape)


def broadcast_object(run: Run, value: Any, source: int, group: Any = None) -> Any:
    """The source's picklable object on every rank of the group; ``source`` is a rank in the world.

    Raises:
        CollectiveError: A rank did not answer.
    """
    values = [value]
    with _explained(run, f"broadcast of an object from rank {source}", group):
        dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


def all_gather_object(run: Run, value: Any, group: Any = None) -> list[Any]:
    """The picklable objects of all ranks of the group, in rank order.

    Raises:
        CollectiveError: A rank did not answer.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    with _explained(run, "all_gather of objects", group):
        dist.all_gather_object(values, value, group=group)
    return values


def barrier(run: Run, group: Any = None) -> None:
    """Return when every rank of the group has called it.

    Raises:
        CollectiveError: A rank did not answer within the collective timeout.
    """
    with _explained(run, "barrier", group):
        dist.barrier(group=group)


def _as_carried(tensor: Tensor) -> Tensor:
    """The tensor's elements in one dimension, as bytes if communication libraries don't know the dtype."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat if flat.dtype in _CARRIED else flat.view(torch.uint8)


def _reduction_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype to reduce in: one that the libraries carry, and exact enough for the operation."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        narrow = dtype.itemsize == 1 or (dtype.itemsize == 2 and op in ("sum", "mean"))
        return torch.float32 if narrow else dtype
    if dtype == torch.bool:
        return torch.int64 if op == "sum" else torch.uint8
    return dtype if dtype in _CARRIED else torch.int64


@contextlib.contextmanager
def _explained(run: Run, what: str, group: Any) -> Iterator[None]:
    """Turn the library's error, which names a socket, into one that names the collective, the rank and the cure."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        timeout = run.config.collective_timeout
        limit = "the communication library's own limit" if timeout is None else f"{timeout:g} s"
        raise CollectiveError(
            f"rank {run.world.rank}: {what} over {dist.get_world_size(group)} ranks failed after "
            f"{time.monotonic() - start:.1f} s: {first_line(error)}\n"
            f"As a rule another rank has ended or never came to this call: look for the first error among all ranks. "
            f"If a rank is only slow, raise collective_timeout (now: {limit})"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error of torch's native code says, without its stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
