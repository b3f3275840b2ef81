"""Walking nested batches and outputs: any nesting of containers, whose types are kept as they are.

torch's pytree knows fewer types (no arbitrary mappings, no dataclasses that were not registered) and rebuilds some of
them as others; a batch must come out of the loader as the collate function made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["cast_floats", "leaves", "map_leaves", "map_tensors"]


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
