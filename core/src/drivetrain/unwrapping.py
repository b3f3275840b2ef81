"""From a prepared model back to the user's module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from drivetrain.forward import AutocastForward

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["is_compiled_module", "unwrap"]


def unwrap(run: Run | None, model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    """The module inside a prepared model.

    Args:
        run: The run that prepared it; None if nothing was prepared.
        model: Prepared or not.
        keep_fp32_wrapper: Keep the autocast around its forward; False gives it its own forward back, and ordinary
            modules in place of those that the precision put into it.
        keep_torch_compile: Keep it compiled.
    """
    bare: nn.Module = model if run is None else run.hooks.unwrap(run=run, model=model)
    if not keep_torch_compile:
        bare._compiled_call_impl = None
        bare = getattr(bare, "_orig_mod", bare)
    if not keep_fp32_wrapper:
        AutocastForward.remove(bare)
        if run is not None:
            bare = run.hooks.restore_model(run=run, model=bare)
    return bare


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module is compiled, in place or by ``torch.compile``. A part that is does not make the whole one."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
