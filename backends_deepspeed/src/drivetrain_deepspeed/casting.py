"""Inputs and outputs of a model whose parameters the engine keeps in half precision."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.nested import cast_floats, map_tensors

__all__ = ["install"]


def install(module: nn.Module, compute: torch.dtype, output: torch.dtype | None) -> None:
    """Cast what goes into a module's forward to the dtype of its parameters, and what comes out of it.

    Args:
        module: The user's, inside of the engine: unwrapped it must compute the same.
        compute: Floating-point inputs get it.
        output: Half-precision outputs get it; None leaves them.
    """
    module.register_forward_pre_hook(functools.partial(_cast_inputs, compute), with_kwargs=True)
    if output is not None:
        module.register_forward_hook(functools.partial(_cast_outputs, output))


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, args), map_tensors(cast, kwargs)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_floats(output, dtype)
