"""Collectives for code that has no Accelerator at hand: they run in this process's run, which they start if need be.

The Accelerator's methods of the same names do the same; only the default of ``reduce`` differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from drivetrain import collectives, state

if TYPE_CHECKING:
    import torch
    from torch import nn

    from drivetrain.world import Run

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "extract_model_from_parallel",
    "gather",
    "gather_object",
    "is_bf16_available",
    "pad_across_processes",
    "reduce",
    "wait_for_everyone",
]


def _run() -> Run:
    return state.ensure().run


def gather(tensor: Any) -> Any:
    """Tensors and arrays of all ranks joined along the first dimension; nested data keeps its structure.

    Raises:
        CollectiveMismatchError: Shapes or dtypes differ between ranks; the same on all of them.
    """
    return collectives.gather(_run(), tensor)


def gather_object(object: Any) -> list[Any]:
    """Lists of picklable objects of all ranks, joined in rank order; other objects: the list of all ranks' ones."""
    return collectives.gather_object(_run(), object)


def reduce(tensor: Any, reduction: Literal["sum", "mean", "max", "min", "none"] = "mean", scale: float = 1.0) -> Any:
    """Tensors reduced elementwise over all ranks, then multiplied by ``scale``; the same on each rank.

    ``Accelerator.reduce`` sums where nothing else is said; this takes the mean.
    """
    return collectives.reduce(_run(), tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The source rank's tensors on every rank, in the structure given."""
    return collectives.broadcast(_run(), tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace, in place, every item of a list by the source rank's; returns the list."""
    return collectives.broadcast_object_list(_run(), object_list, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors and arrays along ``dim`` to the largest size any rank has, so that they can be gathered."""
    return collectives.pad_across_processes(_run(), tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return when every process has called this."""
    collectives.wait_for_everyone(_run())


def is_bf16_available() -> bool:
    """Whether bfloat16 computations work on this process's device."""
    run = _run()
    return bool(run.hooks.bf16_supported(run=run))


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """The module inside a prepared model; see ``Accelerator.unwrap_model``."""
    from drivetrain.unwrapping import unwrap

    runtime = state.current()
    return unwrap(None if runtime is None else runtime.run, model, keep_fp32_wrapper, keep_torch_compile)
