"""What torch has to say about a device: its module of the device's type, and ``torch.accelerator``.

Vendors' modules follow one another's names for years, but none has all; ``torch.accelerator`` is newer, and works
only where a vendor has taken part in it. So a question goes to one, then to the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["compute_dtypes", "empty_cache", "memory", "module_of"]

_MEMORY = {
    "allocated": ("memory_allocated",),
    "reserved": ("memory_reserved",),
    "peak": ("max_memory_allocated",),
    "total": ("mem_get_info", "get_memory_info"),  # free and total
}


def module_of(device: torch.device) -> Any:
    """Torch's module of a device's type; None where torch has none, or one without a life of its own."""
    try:
        return torch.get_device_module(device)
    except (RuntimeError, AttributeError):
        return None


def compute_dtypes(device: torch.device) -> frozenset[str] | None:
    """Names of the dtypes below 32 bits that a device computes in; None if it does not say."""
    module = module_of(device)
    listed = getattr(module, "get_amp_supported_dtype", None)  # what torch asks of devices from outside its own tree
    if listed is not None:
        return frozenset(str(dtype).removeprefix("torch.") for dtype in listed())
    bf16 = getattr(module, "is_bf16_supported", None)
    return None if bf16 is None or bf16() else frozenset({"float16"})


def memory(device: torch.device) -> dict[str, int]:
    """Bytes ``allocated``, ``reserved``, ``peak`` and ``total``, as far as they are counted."""
    numbers = {key: _memory_number(device, names) for key, names in _MEMORY.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def _memory_number(device: torch.device, names: Sequence[str]) -> int | None:
    """What the first function of one of these names says that there is, and that answers."""
    for module in (module_of(device), torch.accelerator):
        for read in filter(None, (getattr(module, name, None) for name in names)):
            with contextlib.suppress(RuntimeError):  # not every vendor's allocator counts
                answer = read(device)
                return int(answer[1] if isinstance(answer, tuple) else answer)
    return None


def empty_cache(device: torch.device) -> None:
    """Give cached memory back, where there is a way to."""
    own = getattr(module_of(device), "empty_cache", None)
    if own is not None:
        own()
        return
    with contextlib.suppress(RuntimeError):  # the vendor's allocator takes no part in it
        torch.accelerator.empty_cache()
