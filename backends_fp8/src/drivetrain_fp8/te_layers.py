"""Transformer Engine's layers in place of torch's, and the context they compute in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import transformer_engine.pytorch as te
from torch import nn

from drivetrain import defaults
from drivetrain.world import Run
from drivetrain_fp8 import layers, te_recipes
from drivetrain_fp8.config import TeConfig

__all__ = ["LayerNorm", "Linear", "autocast", "convert"]


def convert(model: nn.Module, config: TeConfig, recipe: Any) -> nn.Module:
    """The engine's layers in place of torch's, with the same parameters, under the same names.

    Args:
        model: As the user made it. Changed in place.
        config: The section.
        recipe: The engine's.

    Raises:
        ConfigError: ``exclude`` matches nothing in this model.
    """
    multiple = te_recipes.multiple(recipe)
    offered: dict[type[nn.Module], layers.Fits] = {
        nn.Linear: lambda linear: _misfit_linear(linear, multiple),
        nn.LayerNorm: _misfit_norm,
    }
    kinds = {kind: fits for kind, fits in offered.items() if kind.__name__ in config.modules}
    selection = layers.select("fp8-te", model, kinds, config)
    selection.log(model, f"by Transformer Engine ({type(recipe).__name__})")
    return layers.put_in_place(model, {module: _MAKERS[type(module)](module) for module in selection.chosen.values()})


def _misfit_linear(linear: nn.Linear, multiple: int) -> str | None:
    if linear.in_features % multiple or linear.out_features % multiple:
        return f"whose in_features or out_features is no multiple of {multiple}"
    return None


def _misfit_norm(norm: nn.LayerNorm) -> str | None:
    if norm.weight is None or norm.bias is None:
        return "without a weight or a bias of their own"
    return None


class _PlainState:
    """Leaves out the engine's extra state: it is a pickle, and would keep weights from any other precision.

    What would be in it goes into checkpoints by the hook ``precision_state``.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class Linear(_PlainState, te.Linear):
    """The engine's, whose state dict is that of ``nn.Linear``."""


class LayerNorm(_PlainState, te.LayerNorm):
    """The engine's, whose state dict is that of ``nn.LayerNorm``."""


def _linear(old: Any) -> nn.Module:
    bias = old.bias is not None
    made = Linear(old.in_features, old.out_features, bias=bias, params_dtype=old.weight.dtype, device="meta")
    return _with_parameters(made, old)


def _layer_norm(old: Any) -> nn.Module:
    made = LayerNorm(old.normalized_shape, eps=old.eps, dtype=old.weight.dtype, device="meta")
    return _with_parameters(made, old)


_MAKERS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {nn.Linear: _linear, nn.LayerNorm: _layer_norm}


def _with_parameters(made: nn.Module, old: nn.Module) -> nn.Module:
    """The user's own parameters, as they are: optimizers and ties know them."""
    for name, parameter in old._parameters.items():
        if parameter is not None:
            made._parameters[name] = parameter
    return made


@contextlib.contextmanager
def autocast(run: Run, recipe: Any, enabled: bool) -> Any:
    """Context of a forward: the compute dtype, unless the backend sees to that itself, and the engine's recipe.

    Args:
        run: The run.
        recipe: The engine's.
        enabled: Whether in 8 bits at all; if not, converted layers compute in the compute dtype.
    """
    native = run.policy.compute in run.capabilities.native_dtypes
    outer = contextlib.nullcontext() if native else defaults.autocast(run, None)
    with outer, te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=run.world.data_group):
        yield
