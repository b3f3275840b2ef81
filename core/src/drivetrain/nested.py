"""Walking nested batches and outputs: any nesting of containers, whose types are kept as they are.

torch's pytree knows fewer types (no arbitrary mappings, no dataclasses that were not registered) and rebuilds some of
them as others; a batch must come out of the loader as the collate function made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = [
    "cast_floats",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "leaves",
    "listify",
    "map_leaves",
    "map_tensors",
    "merge_dicts",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]


def map_leaves(function: Callable[[Any], Any], data: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply ``function`` to everything in ``data`` that is no container.

    Lists, tuples, namedtuples, mappings of any type, dataclasses and attrs classes are rebuilt as what they were, with
    their other attributes (a ``defaultdict`` keeps its factory).

    Args:
        function: Takes a leaf, returns what stands in its place.
        data: Any nesting.
        is_leaf: Says of a container that it is to be handed to ``function`` whole.
    """
    if isinstance(data, Tensor) or (is_leaf is not None and is_leaf(data)):
        return function(data)
    if isinstance(data, tuple):
        items = [map_leaves(function, item, is_leaf) for item in data]
        if hasattr(data, "_fields"):
            return type(data)(*items)
        return tuple(items) if type(data) is tuple else type(data)(items)
    if isinstance(data, list):
        items = [map_leaves(function, item, is_leaf) for item in data]
        if type(data) is list:
            return items
        made = copy(data)
        made[:] = items
        return made
    if isinstance(data, Mapping):
        if type(data) is dict:
            return {key: map_leaves(function, value, is_leaf) for key, value in data.items()}
        return _rebuild_mapping(data, {key: map_leaves(function, value, is_leaf) for key, value in data.items()})
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data)]
        return _replace(data, {name: map_leaves(function, getattr(data, name), is_leaf) for name in names})
    if attrs.has(type(data)):
        names = [field.name for field in attrs.fields(type(data))]
        return _replace(data, {name: map_leaves(function, getattr(data, name), is_leaf) for name in names})
    return function(data)


def _rebuild_mapping(data: Any, values: dict[Any, Any]) -> Any:
    if not isinstance(data, MutableMapping):
        return type(data)(values)
    made = copy(data)
    for key, value in values.items():
        made[key] = value
    if dataclasses.is_dataclass(data):  # a mapping that is a dataclass too holds each value twice
        for field in dataclasses.fields(data):
            if field.name in values:
                object.__setattr__(made, field.name, values[field.name])
    return made


def _replace(data: Any, values: dict[str, Any]) -> Any:
    """A copy with other field values, without running ``__init__``, which may do more than store them."""
    made = copy(data)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply ``function`` to every tensor in ``data``; whatever else is in it stays.

    Objects with a ``to`` method of their own that are no containers (a tokenizer's batch is one) are left alone, unless
    they are mappings.
    """
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, data)


def leaves(data: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Everything in ``data`` that is no container, in a fixed order; ``is_leaf`` as in ``map_leaves``."""
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(collect, data, is_leaf)
    return found


def cast_floats(data: Any, dtype: torch.dtype) -> Any:
    """``data`` with every half-precision tensor cast to ``dtype``; other dtypes stay."""
    if type(data) is Tensor:
        return data.to(dtype) if data.dtype in _HALVES else data
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype in _HALVES else tensor, data)


_HALVES = frozenset({torch.float16, torch.bfloat16})


# ------------------------------------------------------------------- what scripts of their own do with nested batches


def convert_to_fp32(tensor: Any) -> Any:
    """Nested data with every float16 and bfloat16 tensor cast to float32."""
    return cast_floats(tensor, torch.float32)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves of nested data that pass a test.

    Args:
        func: Called with a leaf, then ``args`` and ``kwargs``.
        data: Any nesting.
        *args: Handed on.
        test_type: Which leaves it is applied to.
        error_on_other_type: Whether any other leaf is an error; if not, it stays.
        **kwargs: Handed on.

    Raises:
        TypeError: ``error_on_other_type``, and there is a leaf of another type.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", repr(func))
            raise TypeError(f"{name} can't be applied to a {type(leaf).__name__}, only to what {test_type} accepts")
        return leaf

    return map_leaves(apply, data)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Iterable[str] | None = None
) -> Any:
    """Nested data with every tensor, and every object with a ``to`` of its own, on a device.

    Tuples and dataclasses with a ``to`` move themselves too: a ``PackedSequence`` knows which of its tensors must stay.

    Args:
        tensor: Any nesting.
        device: As ``Tensor.to`` takes it.
        non_blocking: Whether a copy may overlap with what follows; needs pinned memory.
        skip_keys: What mappings hold under these keys stays where it is.
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if isinstance(leaf, Mapping):
            return _rebuild_mapping(leaf, {key: item if key in skipped else walk(item) for key, item in leaf.items()})
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    def is_leaf(item: Any) -> bool:
        if isinstance(item, Mapping):
            return bool(skipped)
        return callable(getattr(type(item), "to", None))  # of its class: a field may be called so too

    def walk(data: Any) -> Any:
        return map_leaves(move, data, is_leaf)

    return walk(tensor)


def find_batch_size(data: Any) -> int | None:
    """Rows of the first tensor in nested data that has any dimension; None if there is none."""
    return next((leaf.shape[0] for leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.ndim), None)


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor in nested data; None if there is none."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Nested data with the same slice of every tensor's first dimension."""
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def listify(data: Any) -> Any:
    """Nested data with every tensor as a list of Python numbers."""
    return map_tensors(lambda tensor: tensor.tolist(), data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Several nestings of tensors, all of one structure, as one with the tensors joined along ``dim``.

    Raises:
        TypeError: A leaf is no tensor.
        ValueError: There is nothing to join, or the structures differ.
    """
    if not data:
        raise ValueError("concatenate needs at least one item")
    columns = iter(list(zip(*(leaves(item) for item in data), strict=True)))

    def join(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"only tensors can be concatenated; got a {type(leaf).__name__}")
        return torch.cat(next(columns), dim=dim)

    return map_leaves(join, data[0])


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Items as a sequence of the type of ``obj``, a namedtuple included."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*generator)
    return type(obj)(generator)


def is_torch_tensor(tensor: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether this is an instance of a named tuple."""
    return isinstance(data, tuple) and isinstance(getattr(data, "_fields", None), tuple)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Lay nested settings over others, in place: mappings are merged, anything else is replaced.

    Args:
        source: Wins.
        destination: Changed, and returned.
    """
    for key, value in source.items():
        if isinstance(value, Mapping):
            below = destination.get(key)
            destination[key] = merge_dicts(value, below if isinstance(below, dict) else {})
        else:
            destination[key] = value
    return destination
