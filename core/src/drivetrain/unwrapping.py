"""From a prepared model back to the user's module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from drivetrain.forward import AutocastForward

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["unwrap"]


def unwrap(run: Run | None, model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    """The module inside a prepared model.

    Args:
        run: The run that prepared it; None if nothing was prepared.
        model: Prepared or not.
        keep_fp32_wrapper: Keep the autocast around its forward; False gives it its own forward back.
        keep_torch_compile: Keep it compiled.
    """
    bare: nn.Module = model if run is None else run.hooks.unwrap(run=run, model=model)
    if not keep_torch_compile:
        bare._compiled_call_impl = None
        bare = getattr(bare, "_orig_mod", bare)
    if not keep_fp32_wrapper:
        AutocastForward.remove(bare)
    return bare
