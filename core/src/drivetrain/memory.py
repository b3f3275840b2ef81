"""Running out of memory: giving it back, and finding a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drivetrain import state
from drivetrain.errors import DrivetrainError

__all__ = ["clear_device_cache", "find_executable_batch_size", "looks_out_of_memory", "release_memory"]

logger = logging.getLogger(__name__)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device's cached memory back.

    Args:
        garbage_collection: Collect Python's garbage first, which may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    runtime = state.current()
    if runtime is not None:  # before there is a run, nothing is on a device
        runtime.run.hooks.empty_cache(run=runtime.run)


def release_memory(*objects: Any) -> list[None]:
    """Give back the memory of objects nothing else refers to: ``model, loader = release_memory(model, loader)``.

    A function can't clear its caller's variables: their memory is free once these are bound to what is returned.

    Args:
        *objects: Of any kind.

    Returns:
        As many Nones.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorator: call a function with smaller and smaller batch sizes until it does not run out of memory.

    The function's first argument is the batch size, which its callers leave out. Every call starts from
    ``starting_batch_size``. What earlier tries allocated is freed before the next one, so models and optimizers should
    be built inside the function. In a run of several processes all of them must run out of memory alike.

    Args:
        function: What to call; left out when the decorator is used with arguments.
        starting_batch_size: The first one tried.
        reduce_batch_size_fn: Returns the next one to try. It may take the one that failed. None: half of it.

    Raises:
        DrivetrainError: Not even a batch of one fits, or the batch size was given by the caller. Any exception of the
            function that does not mean a lack of memory passes through.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    smaller = _reducer(reduce_batch_size_fn)

    @functools.wraps(function)
    def find(*args: Any, **kwargs: Any) -> Any:
        _check_call(function, args, kwargs)
        batch_size, used = starting_batch_size, ""
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
                used = _memory_in_words()  # now, while the failed try still holds it
            # Outside of the handler, where the exception no longer keeps the frames of the failed try alive.
            failed, batch_size = batch_size, smaller(batch_size)
            logger.info("%s ran out of memory with batch size %d%s", function.__name__, failed, used)
        raise DrivetrainError(
            f"{function.__name__} ran out of memory with every batch size from {starting_batch_size} down, and zero is "
            f"reached: not even the smallest batch fits{used}"
        )

    return find


def _memory_in_words() -> str:
    """What is in use on the device, as far as that is counted; empty if it is not."""
    runtime = state.current()
    if runtime is None:  # before there is a run, nothing is on a device
        return ""
    numbers = runtime.run.hooks.memory(run=runtime.run)
    if "allocated" not in numbers:
        return ""
    total = f" of {numbers['total'] / 2**30:.1f}" if "total" in numbers else ""
    return f" ({runtime.run.world.device}: {numbers['allocated'] / 2**30:.1f}{total} GiB in use)"


def _check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(1, *args, **kwargs)
    except TypeError as error:
        first, *others = signature.parameters or ("nothing",)
        raise TypeError(
            f"{function.__name__}: {error}. Its first argument ({first}) is the batch size, which is found for you; "
            f"call {function.__name__}({', '.join(others)})"
        ) from None


def _reducer(given: Callable[..., int] | None) -> Callable[[int], int]:
    if given is None:
        return lambda size: size // 2
    if inspect.signature(given).parameters:
        return given
    return lambda size: given()


def looks_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means a lack of memory, by its class and by the messages of torch's allocators."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def _is_out_of_memory(error: Exception) -> bool:
    runtime = state.current()
    if runtime is None:
        return looks_out_of_memory(error)
    return bool(runtime.run.hooks.is_out_of_memory(run=runtime.run, error=error))
