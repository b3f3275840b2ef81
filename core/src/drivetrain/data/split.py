"""One process's part of a list, tensor or dict that every process has whole; nothing is communicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["split"]


def bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """First and last + 1 index of a rank's part: the first ``length % size`` ranks get one more."""
    share, extra = divmod(length, size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


def split(inputs: Any, rank: int, size: int, apply_padding: bool) -> Any:
    """A rank's part of ``inputs``.

    Args:
        inputs: A list, tuple, string, tensor, array, or anything with ``len`` and slices; or a mapping of such, all of
            one length. It is left as it is.
        rank: Whose part.
        size: Number of parts.
        apply_padding: Repeat the last element of ``inputs`` where a part is shorter than the longest.

    Raises:
        TypeError: There is no length, or nothing that could be sliced.
        ValueError: Values of a mapping differ in length; the lengths are named.
    """
    _check(inputs)
    if size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        return {key: split(value, rank, size, apply_padding) for key, value in inputs.items()}
    length = len(inputs)
    start, stop = bounds(length, rank, size)
    part = inputs[start:stop]
    missing = -(-length // size) - (stop - start)
    if not apply_padding or missing <= 0 or length == 0:
        return part
    last = inputs[length - 1 : length]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, last.expand(missing, *last.shape[1:])])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([part, np.repeat(last, missing, axis=0)])
    if hasattr(inputs, "select"):  # a table-like dataset, whose slices are dicts of columns
        return inputs.select([*range(start, stop), *[length - 1] * missing])
    if isinstance(inputs, range):  # can't be joined
        return [*part, *[*last] * missing]
    return part + last * missing


def _check(inputs: Any) -> None:
    """Refuse in a world of any size what could not be split in one of several processes."""
    for one in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        scalar = isinstance(one, (torch.Tensor, np.ndarray)) and one.ndim == 0
        if scalar or not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            what = "a 0-d tensor or array" if scalar else f"an object of type {type(one).__name__}"
            raise TypeError(f"a list, tensor, array or mapping of these can be split between processes; got {what}")
    lengths = {key: len(value) for key, value in inputs.items()} if isinstance(inputs, Mapping) else {}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all values of a mapping to split must have one length; these have {lengths}")
