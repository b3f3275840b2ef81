"""A STAND-IN for ``transformer_engine.pytorch``, which needs an NVIDIA GPU to be imported.

It has the few names that this member uses, and keeps scales as the engine does: they are learnt from the largest values
of past steps, shared over a process group, and decide how values are rounded. What the engine really computes is
looked at on a GPU by ``benchmarks/gpu_fp8.py``. Recipes are the engine's own classes where they are installed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["CONTEXTS", "LayerNorm", "Linear", "engine_recipes", "installed"]

CONTEXTS: list[dict[str, Any]] = []
"""What every ``autocast`` was entered with, the latest last."""


class _State:
    """What delayed scaling keeps of the tensors of one direction."""

    def __init__(self, recipe: Any, tensors: int) -> None:
        self.scale = torch.ones(tensors)
        self.amax_history = torch.zeros(recipe.amax_history_len, tensors)


class _Module(nn.Module):
    """What the engine's modules have: extra state that is a pickle."""

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(pickle.dumps({"recipe": None})), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError("this would unpickle")


class Linear(_Module):
    """Rounds input and weight to 8 bits by scales that are learnt."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None, device: Any = "cuda"
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.fp8_meta: dict[str, Any] = {}
        self.fp8_meta_tensors_initialized = False
        self.register_parameter("weight", nn.Parameter(torch.empty(out_features, in_features, device=device)))
        if bias:
            self.register_parameter("bias", nn.Parameter(torch.empty(out_features, device=device)))
        else:
            self.bias = torch.empty(0)

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        if self.fp8_meta_tensors_initialized:
            return
        gemms = self.fp8_meta["num_gemms"]
        for direction, count in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[direction] = _State(recipe, gemms * count) if recipe.delayed() else object()
        self.fp8_meta_tensors_initialized = True

    def forward(self, x: Tensor) -> Tensor:
        now = _GLOBAL.entered[-1] if _GLOBAL.entered else None
        weight, bias = self.weight, self.bias if self.use_bias else None
        if now is None or not now["enabled"]:
            return nn.functional.linear(x, weight, bias)
        recipe = now["recipe"]
        self.fp8_meta |= {"recipe": recipe, "num_gemms": 1}
        self.init_fp8_meta_tensors(recipe)
        if recipe.delayed():
            state = self.fp8_meta["scaling_fwd"]
            state.amax_history[0, :2] = torch.stack(
                [x.detach().abs().max().float(), weight.detach().abs().max().float()]
            )
            _GLOBAL.learning.append((state, recipe))
            x, weight = _rounded(x, state.scale[0]), _rounded(weight, state.scale[1])
        else:
            x, weight = _rounded(x, 448 / x.detach().abs().max()), _rounded(weight, 448 / weight.detach().abs().max())
        return nn.functional.linear(x, weight, bias)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return ((x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return _Rounded.apply(x, scale)


class LayerNorm(_Module):
    def __init__(self, normalized_shape: Any, *, eps: float = 1e-5, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device))
        self.bias = nn.Parameter(torch.empty(normalized_shape, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@attrs.define
class _Global:
    entered: list[dict[str, Any]] = attrs.field(factory=list)
    learning: list[tuple[_State, Any]] = attrs.field(factory=list)


_GLOBAL = _Global()


class autocast:
    """Learns at the end of the outermost context, as the engine does."""

    def __init__(self, enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None) -> None:
        self.arguments = {"enabled": enabled, "recipe": recipe, "group": amax_reduction_group}

    def __enter__(self) -> None:
        CONTEXTS.append({**self.arguments, "autocast": torch.is_autocast_enabled("cpu")})
        _GLOBAL.entered.append(self.arguments)

    def __exit__(self, *_: Any) -> None:
        _GLOBAL.entered.pop()
        if not _GLOBAL.entered and torch.is_grad_enabled():
            for state, recipe in _GLOBAL.learning:
                _learn(state, recipe, self.arguments["group"])
            _GLOBAL.learning.clear()


def _learn(state: _State, recipe: Any, group: Any) -> None:
    if recipe.reduce_amax and dist.is_initialized():
        dist.all_reduce(state.amax_history[0], dist.ReduceOp.MAX, group=group)
    largest = state.amax_history.amax(0)
    state.scale = torch.where(largest > 0, 448 / largest.clamp(min=1e-12), state.scale)
    state.amax_history = state.amax_history.roll(1, 0)
    state.amax_history[0] = 0


def engine_recipes() -> Any:
    """The engine's own recipe classes; None where it is not installed."""
    # Lets it be imported without its libraries, of which it warns.
    with mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            from transformer_engine.common import recipe
        except ImportError:
            return None
    return recipe


def _recipes() -> Any:
    return engine_recipes() or _made_up_recipes()


def _made_up_recipes() -> Any:
    import dataclasses

    class Recipe:
        def delayed(self) -> bool:
            return type(self).__name__ == "DelayedScaling"

    module = types.ModuleType("transformer_engine.common.recipe")
    fields = [("amax_history_len", int, 1024), ("margin", int, 0), ("reduce_amax", bool, True)]
    module.DelayedScaling = dataclasses.make_dataclass("DelayedScaling", fields, bases=(Recipe,))
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
        setattr(module, name, dataclasses.make_dataclass(name, [], bases=(Recipe,)))
    return module


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The stand-in in place of the engine, in a run on the CPU; nothing of it is left afterwards."""
    from drivetrain import registry
    from drivetrain_fp8 import Fp8Te, te_availability

    recipes = _recipes()
    engine = types.ModuleType("transformer_engine")
    common = types.ModuleType("transformer_engine.common")
    pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.common, engine.pytorch, common.recipe = common, pytorch, recipes
    for name in ("Linear", "LayerNorm", "autocast"):
        setattr(pytorch, name, globals()[name])
    pytorch.get_default_recipe = lambda: recipes.DelayedScaling()
    for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        setattr(pytorch, f"is_{name}_available", lambda return_reason=False: (True, "") if return_reason else True)
    modules = {
        "transformer_engine": engine,
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": recipes,
        "transformer_engine.pytorch": pytorch,
    }
    ours = [f"drivetrain_fp8.{name}" for name in ("te_layers", "te_recipes", "te_state")]
    real = {name: sys.modules.get(name) for name in modules}
    with (
        mock.patch.object(Fp8Te, "requires", ()),
        mock.patch.object(te_availability, "reason_against", return_value=None),
    ):
        sys.modules.update(modules)
        _forget(ours)
        registry.refresh()
        CONTEXTS.clear()
        try:
            yield
        finally:
            _forget([*ours, *modules])
            sys.modules.update({name: module for name, module in real.items() if module is not None})
            registry.refresh()


def _forget(names: list[str]) -> None:
    """Have modules imported anew when they are next asked for."""
    for name in names:
        sys.modules.pop(name, None)
        package, _, leaf = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(leaf, None)
