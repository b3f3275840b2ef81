"""Rows of loaded batches: taking some, joining several, whatever the collate function made of them.

A batch is any nesting of containers. What holds one entry a sample (a tensor along dimension 0, a list of strings) is
cut and joined; what holds one value for all of them (a flag, a 0-d tensor) is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from drivetrain.nested import leaves, map_leaves

__all__ = [
    "Collated",
    "CollatedPieces",
    "CountingCollate",
    "concatenate",
    "join_rows",
    "leading_rows",
    "take_rows",
]


@attrs.frozen
class Collated:
    """A loaded batch, and how many samples it was made of."""

    rows: int
    data: Any


@attrs.frozen
class CountingCollate:
    """A collate function that also says how many samples it got; that can't be told from what it makes of them."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


class _UnlikeError(Exception):
    """Batches that can't be joined, since their entries differ in more than the number of samples."""


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0


def leading_rows(data: Any) -> int:
    """Rows of a batch of unknown making: those of its first tensor, else entries of its first list, else one."""
    for leaf in leaves(data):
        if _has_rows(leaf):
            return len(leaf)
    if isinstance(data, Mapping):
        return next((leading_rows(value) for value in data.values()), 1)
    return len(data) if isinstance(data, (list, tuple)) else 1


def _per_sample(rows: int) -> Callable[[Any], bool]:
    """Says of a list whether it has one entry a sample, and is no container of tensors that do."""

    def is_per_sample(data: Any) -> bool:
        if type(data) not in (list, tuple) or len(data) != rows:
            return False
        arrays = [[leaf for leaf in leaves(entry) if isinstance(leaf, (Tensor, np.ndarray))] for entry in data]
        holders = [found for found in arrays if found]
        return not holders or not all(_has_rows(leaf) and len(leaf) == rows for found in holders for leaf in found)

    return is_per_sample


def take_rows(data: Any, rows: int, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch of ``rows`` samples, in the structure it has."""
    per_sample = _per_sample(rows)

    def take(leaf: Any) -> Any:
        if per_sample(leaf):
            return leaf[start:stop]
        if _has_rows(leaf) and len(leaf) % rows == 0:
            per_row = len(leaf) // rows
            return leaf[start * per_row : stop * per_row]
        return leaf

    return map_leaves(take, data, per_sample)


def join_rows(batches: Sequence[Collated]) -> Any:
    """One batch with the samples of several, in the structure of the first.

    Raises:
        ValueError: They can't be joined: their structures differ, or the shapes of tensors beyond dimension 0.
    """
    try:
        return _join(batches)
    except _UnlikeError as error:
        raise ValueError(f"batches can't be joined: {error}") from None


def _join(batches: Sequence[Collated]) -> Any:
    if len(batches) == 1:
        return batches[0].data
    rows = [batch.rows for batch in batches]
    columns = [leaves(batch.data, _per_sample(batch.rows)) for batch in batches]
    if len({len(column) for column in columns}) != 1:
        raise _UnlikeError("they hold different numbers of entries")
    joined = iter([_join_leaf(entries, rows) for entries in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), batches[0].data, _per_sample(rows[0]))


def _join_leaf(entries: Sequence[Any], rows: Sequence[int]) -> Any:
    first = entries[0]
    if any(type(entry) is not type(first) for entry in entries):
        raise _UnlikeError(f"one has a {type(first).__name__} where another has something else")
    if type(first) in (list, tuple):
        return type(first)(item for entry in entries for item in entry)
    if not _has_rows(first):
        return first
    if any(len(entry) * rows[0] != len(first) * count for entry, count in zip(entries, rows, strict=True)):
        return first  # one for all samples
    if len({(*entry.shape[1:], entry.dtype) for entry in entries}) != 1:
        raise _UnlikeError("shapes " + ", ".join(str(tuple(entry.shape)) for entry in entries))
    return torch.cat(list(entries)) if isinstance(first, Tensor) else np.concatenate(entries)


def concatenate(batches: Sequence[Any]) -> Any:
    """Every tensor and every list of plain values joined with its like in the other batches, whatever its rows mean.

    Raises:
        ValueError: The batches have different structures, or shapes beyond dimension 0.
    """
    columns = [leaves(batch, _is_plain_list) for batch in batches]
    if len({len(column) for column in columns}) != 1:
        raise ValueError("batches can't be joined: they hold different numbers of entries")
    joined = iter([_concatenate_leaf(entries) for entries in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), batches[0], _is_plain_list)


def _is_plain_list(data: Any) -> bool:
    return type(data) in (list, tuple) and not any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves(data))


def _concatenate_leaf(entries: Sequence[Any]) -> Any:
    counts = [len(entry) if _has_rows(entry) else 1 for entry in entries]
    try:
        return _join_leaf(entries, counts)
    except _UnlikeError as error:
        raise ValueError(f"batches can't be joined: {error}") from None


class CollatedPieces:
    """Loaded batches, for the plan."""

    def rows(self, batch: Collated) -> int:
        return batch.rows

    def take(self, batch: Collated, start: int, stop: int) -> Collated:
        if (start, stop) == (0, batch.rows):
            return batch
        return Collated(stop - start, take_rows(batch.data, batch.rows, start, stop))

    def join(self, batches: Sequence[Collated]) -> Collated:
        return Collated(sum(batch.rows for batch in batches), join_rows(batches))

    def fill(self, batch: Collated | None, extra: Sequence[Collated], count: int) -> Collated:
        """Falls back to repeating the batch's own samples, since each batch may be padded to a length of its own."""
        try:
            return self.join([*([] if batch is None else [batch]), *extra])
        except ValueError:
            source = extra[0] if batch is None else batch
            wanted = count if batch is None else batch.rows + count
            whole, rest = divmod(wanted, source.rows)
            return self.join([source] * whole + ([self.take(source, 0, rest)] if rest else []))
