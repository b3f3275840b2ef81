"""Comparing versions of installed distributions, for scripts that run with several."""

from __future__ import annotations

import importlib.metadata
import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["compare_versions", "is_torch_version"]

_OPERATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether a version compares as said: ``compare_versions("numpy", ">=", "2.0")``.

    Args:
        library_or_version: Name of an installed distribution, or a ``packaging`` version.
        operation: One of ``>``, ``>=``, ``==``, ``!=``, ``<=`` and ``<``.
        requirement_version: What it is compared with.

    Raises:
        ValueError: The operation is none of these.
        importlib.metadata.PackageNotFoundError: There is no such distribution.
    """
    from packaging.version import parse

    if operation not in _OPERATIONS:
        raise ValueError(f"{operation!r} is no comparison; there are: {', '.join(_OPERATIONS)}")
    found = library_or_version
    if isinstance(found, str):
        found = parse(importlib.metadata.version(found))
    return _OPERATIONS[operation](found, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """``compare_versions`` for torch."""
    return compare_versions("torch", operation, version)
