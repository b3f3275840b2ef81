"""Collectives on nested data, over the run's hooks. Every rank calls them, with data of the same structure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from drivetrain.errors import CollectiveMismatchError, DrivetrainError
from drivetrain.mismatch import check, describe, describe_dimensions, is_array, is_plain_list, shape, shape_of_rows
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


def _is_any_list(data: Any) -> bool:
    return isinstance(data, (list, tuple))


def _is_list_of_samples(data: Any, samples: int | None) -> bool:
    """Whether this is a list of one value a sample, where a value may be nested too: the words of a text, say.

    A list of several fields, each a list of one value a sample, looks alike. Where the number of samples is known it
    tells them apart; the tuples that torch's collate function makes of fields are always as long.
    """
    if is_plain_list(data):
        return True
    if type(data) is not list or any(is_array(leaf) for leaf in leaves(data)):
        return False
    lengths = {len(item) if type(item) in (list, tuple) else None for item in data}
    if samples is None or None in lengths or len(lengths) > 1:
        return True
    return len(data) == samples and not (type(data[0]) is tuple and len(data[0]) == samples)


def gather(run: Run, data: Any, rows: Rows | None = None) -> Any:
    """Tensors and arrays of all ranks joined along the first dimension in rank order, in the structure they came in.

    A 0-d tensor becomes one of shape ``(size,)``. Lists without tensors in them are joined too, and any other leaf
    becomes the list of all ranks' values. Lists in a tuple are fields, each joined with its like; so are several of one
    length in a list, if ``rows`` says that there is not one for each sample.

    Args:
        run: The run.
        data: Any nesting of tensors and other values.
        rows: Which rows of the current round are real; the others are left out. None keeps all.

    Raises:
        CollectiveMismatchError: Structure, shapes or dtypes differ between ranks.
    """
    is_leaf = functools.partial(_is_list_of_samples, samples=None if rows is None else rows.own)
    varied = rows is not None and len(set(rows.of_processes(run.world))) > 1
    describer = functools.partial(describe, is_leaf=is_leaf, of_array=shape_of_rows if varied else shape)
    check(run, "gather", data, describer)

    def join(leaf: Any) -> Any:
        has_rows = leaf.ndim > 0 if is_array(leaf) else is_leaf(leaf)
        if isinstance(leaf, Tensor):
            lengths = _lengths(run, leaf) if varied and has_rows else None
            joined = _join_tensors(run, leaf, lengths)
        else:
            parts = run.hooks.all_gather_object(run=run, value=leaf, group=None)
            lengths = [len(part) for part in parts] if varied and has_rows else None
            joined = _join_objects(parts, has_rows)
        if rows is None or not has_rows:
            return joined
        if lengths is not None and not rows.are_followed_by(lengths, run.world):
            _check_lengths(leaf, lengths, rows.of_processes(run.world))
            return joined
        return rows.trim(joined, len(leaf))

    return map_leaves(join, data, is_leaf)


def _check_lengths(leaf: Any, lengths: Sequence[int], batches: Sequence[int]) -> None:
    """Refuse tensors and arrays of lengths that follow neither the batches nor each other."""
    if is_array(leaf) and len(set(lengths)) > 1:
        listing = "\n".join(
            f"  rank {rank}: {length} of a batch of {batch}"
            for rank, (length, batch) in enumerate(zip(lengths, batches, strict=True))
        )
        raise CollectiveMismatchError(
            f"ranks came to gather with different numbers of rows, which are not as many for each sample:\n{listing}"
        )


def _lengths(run: Run, tensor: Tensor) -> list[int]:
    """The first dimension of a tensor on each rank."""
    mine = torch.tensor([len(tensor)], dtype=torch.int64, device=run.world.device)
    lengths: list[int] = run.hooks.all_gather(run=run, tensor=mine, group=None).flatten().tolist()
    return lengths


def _join_tensors(run: Run, tensor: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Tensors of all ranks along the first dimension; None stands for equal lengths."""
    tensor = tensor.detach().contiguous()
    if lengths is None or len(set(lengths)) == 1:
        stacked: Tensor = run.hooks.all_gather(run=run, tensor=tensor, group=None)
        return stacked if tensor.ndim == 0 else stacked.reshape(-1, *tensor.shape[1:])
    filled = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    filled[: len(tensor)] = tensor
    stacked = run.hooks.all_gather(run=run, tensor=filled, group=None)
    return torch.cat([part[:length] for part, length in zip(stacked, lengths, strict=True)])


def _join_objects(parts: Sequence[Any], has_rows: bool) -> Any:
    """Lists and arrays of all ranks as one, of anything else a list."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts) if has_rows else np.stack(parts)
    return type(first)(item for part in parts for item in part) if has_rows else parts


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
        TypeError: There is something else than tensors (and None) in the data.
        ValueError: The reduction is none of the five.
    """
    if reduction not in _OPERATIONS:
        raise ValueError(f"reduction must be one of {', '.join(_OPERATIONS)}; got {reduction!r}")
    check(run, f"reduce ({reduction})", data)
    _check_tensors("reduce", data, "make tensors of numbers")

    def one(tensor: Tensor) -> Tensor:
        if reduction == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype())
        if reduction != "none":
            tensor = run.hooks.all_reduce(run=run, tensor=tensor.detach(), op=reduction, group=None)
        return tensor if scale == 1.0 else tensor * scale

    return map_tensors(one, data)


def broadcast(run: Run, data: Any, from_process: int = 0) -> Any:
    """The source rank's tensors on every rank, in the structure given.

    Raises:
        TypeError: There is something else than tensors (and None) in the data.
    """
    _check_source(run, from_process)
    check(run, f"broadcast from {from_process}", data)
    _check_tensors("broadcast", data, "broadcast_object_list sends other objects")
    return map_tensors(
        lambda tensor: run.hooks.broadcast(run=run, tensor=tensor, source=from_process, group=None), data
    )


def broadcast_object_list(run: Run, objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replace, in place, every item by the source rank's; returns the list."""
    _check_source(run, from_process)
    check(run, f"broadcast_object_list from {from_process}", None)
    objects[:] = run.hooks.broadcast_object(run=run, value=objects, source=from_process, group=None)
    return objects


def _check_tensors(what: str, data: Any, cure: str) -> None:
    """Refuse what would come back as it went in, each rank's own, as if it were the same everywhere."""
    others = [leaf for leaf in leaves(data) if not isinstance(leaf, Tensor) and leaf is not None]
    if others:
        raise TypeError(f"{what} takes tensors, and there is a {type(others[0]).__name__} in the data; {cure}")


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
    """Pad every tensor and array along ``dim`` to the largest size any rank has, dtypes kept.

    Those without that dimension stay as they are.
    """
    if run.world.size == 1:
        return data
    check(run, "pad_across_processes", data, describe_dimensions)

    def pad(leaf: Any) -> Any:
        if not is_array(leaf) or not -leaf.ndim <= dim < leaf.ndim:
            return leaf
        sizes = torch.tensor([leaf.shape[dim]], dtype=torch.int64, device=run.world.device)
        largest = int(run.hooks.all_reduce(run=run, tensor=sizes, op="max", group=None))
        if largest == leaf.shape[dim]:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = largest
        padded = leaf.new_full(shape, pad_index) if isinstance(leaf, Tensor) else np.full(shape, pad_index, leaf.dtype)
        start = largest - leaf.shape[dim] if pad_first else 0
        place = [slice(None)] * leaf.ndim
        place[dim] = slice(start, start + leaf.shape[dim])
        padded[tuple(place)] = leaf
        return padded

    return map_leaves(pad, data)


class CollectivesMixin:
    """What an Accelerator gathers and reduces."""

    run: Run
    gate: Accumulation

    def gather(self, tensor: Any) -> Any:
        """Tensors and arrays of all ranks joined along the first dimension; nested data keeps its structure.

        Raises:
            CollectiveMismatchError: Shapes or dtypes differ between ranks; the same on all of them.
        """
        return gather(self.run, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``gather`` without the samples that were repeated to give every rank as many batches.

        Args:
            input_data: Tensors, arrays or lists with one row for each sample of the current batch (or a fixed number of
                rows). Values that are not per sample, such as a 0-d loss, are gathered whole. Of a value repeated for
                a full batch, such as ``loss.repeat(batch_size)``, a shorter batch keeps one row for each sample.
            use_gather_object: Gather lists of picklable objects, one item for each sample.

        Raises:
            CollectiveMismatchError: Structure, shapes or dtypes differ between ranks.
            DrivetrainError: ``even_batches`` is off, and left a rank without a batch in this round.
        """
        loader = self.gate.frame.loader
        rows = getattr(loader, "rows", None)
        if rows is not None:
            rows.check_all_have_some(self.run.world)
            is_list = _is_any_list if use_gather_object else is_plain_list
            input_data = loader.full_batches.fit(input_data, rows.own, loader.batch_size, is_list)
        if use_gather_object:
            return gather_object(self.run, input_data, rows)
        return gather(self.run, input_data, rows)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors reduced elementwise over all ranks: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"none"``."""
        return reduce(self.run, tensor, reduction, scale)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors and arrays along ``dim`` to the largest size any rank has."""
        return pad_across_processes(self.run, tensor, dim, pad_index, pad_first)
