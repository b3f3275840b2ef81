"""Collectives on nested data, over the run's hooks. Every rank calls them, with data of the same structure.

Before a collective moves anything, ranks compare what they are about to send, so that a mismatch is the same clear
error on all of them and not a hang. That costs one exchange of eight bytes; ``check_collectives: false`` leaves it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from drivetrain.errors import CollectiveMismatchError, DrivetrainError
from drivetrain.nested import leaves, map_leaves, map_tensors

if TYPE_CHECKING:
    from drivetrain.accumulation import Accumulation
    from drivetrain.data.rows import Rows
    from drivetrain.world import Run

__all__ = [
    "CollectivesMixin",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "wait_for_everyone",
]


def _describe(data: Any) -> list[str]:
    """What must agree between ranks: for each leaf its shape and dtype, or its type. None stands for no data."""
    return _each(data, lambda tensor: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")


def _describe_dimensions(data: Any) -> list[str]:
    """The same where shapes may differ, but not in the number of dimensions."""
    return _each(data, lambda tensor: f"{tensor.ndim}-d")


def _each(data: Any, describe: Callable[[Tensor], str]) -> list[str]:
    """A text for each leaf, with its keys: ranks may have filled a mapping in different orders."""
    if data is None:
        return []
    if isinstance(data, Mapping):
        return [f"{key}: {text}" for key, value in data.items() for text in _each(value, describe) or ["None"]]
    return [
        describe(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves(data, _is_plain_list)
    ]


def check(run: Run, what: str, data: Any, describe: Callable[[Any], list[str]] = _describe) -> None:
    """Make sure that all ranks are about to do the same.

    Args:
        run: The run.
        what: The collective, with all that must be the same in its arguments.
        data: What this rank brings.
        describe: What must agree of the data, a text for each leaf.

    Raises:
        CollectiveMismatchError: On every rank, naming what each has.
    """
    if run.world.size == 1 or not run.config.check_collectives:
        return
    described = describe(data)
    digest = hashlib.blake2b("\n".join([what, *described]).encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], dtype=torch.int64, device=run.world.device)
    everyone = run.hooks.all_gather(run=run, tensor=mine, group=None)
    if bool((everyone == everyone[0]).all()):
        return
    rows = run.hooks.all_gather_object(run=run, value=(what, described), group=None)
    listing = "\n".join(
        f"  rank {rank}: {name}{' of ' if parts else ''}{', '.join(parts)}" for rank, (name, parts) in enumerate(rows)
    )
    if len({name for name, _ in rows}) > 1:
        raise CollectiveMismatchError(
            f"ranks came to different collectives; every rank must make the same calls in the same order:\n{listing}"
        )
    needs = "shapes and dtypes (pad_across_processes makes shapes equal)" if describe is _describe else "dimensions"
    raise CollectiveMismatchError(
        f"ranks came to {what} with different data; all need the same structure, {needs}:\n{listing}"
    )


def gather(run: Run, data: Any, rows: Rows | None = None) -> Any:
    """Tensors of all ranks joined along the first dimension in rank order, in the structure they came in.

    A 0-d tensor becomes one of shape ``(size,)``. Lists of plain values are joined in the same way; any other leaf
    becomes the list of all ranks' values.

    Args:
        run: The run.
        data: Any nesting of tensors and other values.
        rows: Which rows of the current round are real; the others are left out. None keeps all.

    Raises:
        CollectiveMismatchError: Structure, shapes or dtypes differ between ranks.
    """
    check(run, "gather", data)

    def join(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            stacked = run.hooks.all_gather(run=run, tensor=leaf.detach().contiguous(), group=None)
            joined = stacked if leaf.ndim == 0 else stacked.reshape(-1, *leaf.shape[1:])
            return joined if rows is None or leaf.ndim == 0 else rows.trim(joined, leaf.shape[0])
        parts = run.hooks.all_gather_object(run=run, value=leaf, group=None)
        if not _is_plain_list(leaf):
            return parts
        joined = type(leaf)(item for part in parts for item in part)
        return joined if rows is None else rows.trim(joined, len(leaf))

    return map_leaves(join, data, _is_plain_list)


def _is_plain_list(data: Any) -> bool:
    """Whether this is a list of one value a sample, as collate functions make of strings."""
    return type(data) in (list, tuple) and all(
        item is None or isinstance(item, (str, bytes, int, float, bool)) for item in data
    )


def gather_object(run: Run, data: Any, rows: Rows | None = None) -> list[Any]:
    """Lists of picklable objects of all ranks, joined in rank order; other objects: the list of all ranks' ones."""
    check(run, "gather_object", None)
    parts = run.hooks.all_gather_object(run=run, value=data, group=None)
    if not isinstance(data, (list, tuple)):
        return list(parts)
    joined = [item for part in parts for item in part]
    return joined if rows is None else list(rows.trim(joined, len(data)))


_OPERATIONS = ("sum", "mean", "max", "min", "none")


def reduce(
    run: Run, data: Any, reduction: Literal["sum", "mean", "max", "min", "none"] = "sum", scale: float = 1.0
) -> Any:
    """Every tensor reduced elementwise over all ranks, then multiplied by ``scale``; the same on each rank.

    The mean of integers is a float tensor, on one process as on several.

    Raises:
        ValueError: The reduction is none of the five.
    """
    if reduction not in _OPERATIONS:
        raise ValueError(f"reduction must be one of {', '.join(_OPERATIONS)}; got {reduction!r}")
    check(run, f"reduce ({reduction})", data)

    def one(tensor: Tensor) -> Tensor:
        if reduction == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype())
        if reduction != "none":
            tensor = run.hooks.all_reduce(run=run, tensor=tensor.detach(), op=reduction, group=None)
        return tensor if scale == 1.0 else tensor * scale

    return map_tensors(one, data)


def broadcast(run: Run, data: Any, from_process: int = 0) -> Any:
    """The source rank's tensors on every rank, in the structure given."""
    _check_source(run, from_process)
    check(run, f"broadcast from {from_process}", data)
    return map_tensors(
        lambda tensor: run.hooks.broadcast(run=run, tensor=tensor, source=from_process, group=None), data
    )


def broadcast_object_list(run: Run, objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replace, in place, every item by the source rank's; returns the list."""
    _check_source(run, from_process)
    check(run, f"broadcast_object_list from {from_process}", None)
    objects[:] = run.hooks.broadcast_object(run=run, value=objects, source=from_process, group=None)
    return objects


def _check_source(run: Run, source: int) -> None:
    if not 0 <= source < run.world.size:
        raise DrivetrainError(f"there is no process {source} to broadcast from; the run has {run.world.size}")


def wait_for_everyone(run: Run) -> None:
    """Return when every process has called this.

    Raises:
        CollectiveMismatchError: Another process is in another collective.
    """
    check(run, "wait_for_everyone", None)
    run.hooks.barrier(run=run, group=None)


def pad_across_processes(run: Run, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along ``dim`` to the largest size any rank has, dtypes kept.

    Tensors without that dimension stay as they are.
    """
    if run.world.size == 1:
        return data
    check(run, "pad_across_processes", data, _describe_dimensions)

    def pad(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        sizes = torch.tensor([tensor.shape[dim]], dtype=torch.int64, device=run.world.device)
        largest = int(run.hooks.all_reduce(run=run, tensor=sizes, op="max", group=None))
        if largest == tensor.shape[dim]:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = largest
        padded = tensor.new_full(shape, pad_index)
        start = largest - tensor.shape[dim] if pad_first else 0
        padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
        return padded

    return map_tensors(pad, data)


class CollectivesMixin:
    """What an Accelerator gathers and reduces."""

    run: Run
    gate: Accumulation

    def gather(self, tensor: Any) -> Any:
        """Tensors of all ranks joined along the first dimension; nested data keeps its structure.

        Raises:
            CollectiveMismatchError: Shapes or dtypes differ between ranks; the same on all of them.
        """
        return gather(self.run, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``gather`` without the samples that were repeated to give every rank as many batches.

        Args:
            input_data: One row for each sample of the current batch in the first dimension (or a fixed number of
                rows). Values that are not per sample, such as a 0-d loss, are gathered whole.
            use_gather_object: Gather lists of picklable objects, one item for each sample.
        """
        rows = getattr(self.gate.frame.loader, "rows", None)
        if use_gather_object:
            return gather_object(self.run, input_data, rows)
        return gather(self.run, input_data, rows)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors reduced elementwise over all ranks: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"none"``."""
        return reduce(self.run, tensor, reduction, scale)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors along ``dim`` to the largest size any rank has."""
        return pad_across_processes(self.run, tensor, dim, pad_index, pad_first)
