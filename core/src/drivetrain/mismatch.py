"""Before a collective moves anything, ranks compare what they are about to send.

A mismatch is then the same clear error on all of them and not a hang. That costs one exchange of eight bytes;
``check_collectives: false`` leaves it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.errors import CollectiveMismatchError
from drivetrain.nested import leaves

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["check", "describe", "describe_dimensions", "is_array", "is_plain_list", "shape", "shape_of_rows"]


def is_plain_list(data: Any) -> bool:
    """Whether this is a list of numbers and texts, one a sample, as collate functions make of strings."""
    return type(data) in (list, tuple) and all(
        item is None or isinstance(item, (str, bytes, int, float, bool)) for item in data
    )


def is_array(leaf: Any) -> bool:
    """Whether this is a tensor, or an array of numpy's."""
    return isinstance(leaf, (Tensor, np.ndarray))


def shape(leaf: Any) -> str:
    """The shape of a tensor or array."""
    return str(tuple(leaf.shape))


def shape_of_rows(leaf: Any) -> str:
    """The shape where the first dimension may differ."""
    return f"(any, {', '.join(map(str, leaf.shape[1:]))})" if leaf.ndim else "()"


def describe(
    data: Any, is_leaf: Callable[[Any], bool] = is_plain_list, of_array: Callable[[Any], str] = shape
) -> list[str]:
    """What must agree between ranks: for each leaf its shape and dtype, or its type. None stands for no data.

    Args:
        data: Any nesting.
        is_leaf: Says of a list that it is described as a whole.
        of_array: The shape of a tensor or array, as far as it must agree.
    """
    return _each(data, lambda leaf: f"{of_array(leaf)} {str(leaf.dtype).removeprefix('torch.')}", is_leaf)


def describe_dimensions(data: Any) -> list[str]:
    """The same where shapes may differ, but not in the number of dimensions."""
    return _each(data, lambda leaf: f"{leaf.ndim}-d", is_plain_list)


def _each(data: Any, of_array: Callable[[Any], str], is_leaf: Callable[[Any], bool]) -> list[str]:
    """A text for each leaf, with its keys: ranks may have filled a mapping in different orders."""
    if data is None:
        return []
    if isinstance(data, Mapping):
        return [f"{key}: {text}" for key, value in data.items() for text in _each(value, of_array, is_leaf) or ["None"]]
    return [of_array(leaf) if is_array(leaf) else type(leaf).__name__ for leaf in leaves(data, is_leaf)]


def check(run: Run, what: str, data: Any, describer: Callable[[Any], list[str]] = describe) -> None:
    """Make sure that all ranks are about to do the same.

    Args:
        run: The run.
        what: The collective, with all that must be the same in its arguments.
        data: What this rank brings.
        describer: What must agree of the data, a text for each leaf.

    Raises:
        CollectiveMismatchError: On every rank, naming what each has.
    """
    if run.world.size == 1 or not run.config.check_collectives:
        return
    described = describer(data)
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
    needs = "shapes and dtypes (pad_across_processes makes shapes equal)"
    if describer is describe_dimensions:
        needs = "dimensions"
    raise CollectiveMismatchError(
        f"ranks came to {what} with different data; all need the same structure, {needs}:\n{listing}"
    )
