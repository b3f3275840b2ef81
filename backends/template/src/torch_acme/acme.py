"""``torch.acme``: what torch, and everything built on it, looks for in the module of a device type."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torch_acme import _C

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_rng_state",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "set_device",
    "set_rng_state",
    "stream",
    "synchronize",
]

device_count = _C.device_count
current_device = _C.current_device


def _index(device: Any) -> int:
    """Number of a device that is given as a number, name, ``torch.device`` or None: the current one."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


# ------------------------------------------------------------------------------------------------------------- devices


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the runtime is up; this one has nothing to start."""
    return True


def _is_in_bad_fork() -> bool:
    """Whether this is a forked child that can't use the device; torch asks before it seeds."""
    return False


def set_device(device: Any) -> None:
    """Make a device the current one."""
    _C.set_device(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Any:
    """Context in which a device is the current one."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    """Wait until the device has done all that was queued: nothing ever is."""


# ------------------------------------------------------------------------------------------------------------- streams

Event = torch.Event


class Stream(torch.Stream):
    """The device's one stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Stream:
        """As other devices' streams are made: ``Stream(priority=-1)`` belongs to the current device."""
        return super().__new__(cls, torch.device("acme", _index(device)), priority=priority, **options)


def current_stream(device: Any = None) -> torch.Stream:
    """The stream that operations of this thread go to."""
    return torch.accelerator.current_stream(torch.device("acme", _index(device)))


default_stream = current_stream


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Context in which operations go to a stream."""
    return contextlib.nullcontext() if stream is None else stream


# ------------------------------------------------------------------------------------------------------ random numbers


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _C.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices. ``torch.manual_seed`` calls it."""
    for index in range(device_count()):
        _C.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of a device's generator: bytes, on the CPU."""
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Put back what ``get_rng_state`` returned."""
    _C.default_generator(_index(device)).set_state(state)


# ------------------------------------------------------------------------------------------------------------ services


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes that ``torch.autocast("acme")`` can compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Whether bfloat16 works."""
    return True


def empty_cache() -> None:
    """Give cached memory back."""
    torch.accelerator.empty_cache()
