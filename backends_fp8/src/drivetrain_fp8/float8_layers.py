"""torchao's Linear layers: made from a section, put into a model, and their scales kept up to date."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear

from drivetrain.errors import ConfigError
from drivetrain.logging import get_logger
from drivetrain.world import Run
from drivetrain_fp8 import float8_products, layers
from drivetrain_fp8.config import TorchaoConfig

__all__ = ["AutocastFloat8Linear", "compute_scales", "convert", "linear_config"]

logger = get_logger("drivetrain.fp8")

_SECTION = "fp8-torchao"
_MULTIPLE = 16
"""Of both dimensions of a weight: what products of 8-bit matrices take."""


def convert(run: Run, model: nn.Module, config: TorchaoConfig) -> tuple[nn.Module, bool]:
    """Compute the Linear layers of a model in 8 bits; returns it, and whether any weight is to be gathered in 8 bits.

    Args:
        run: The run.
        model: As the user made it. Changed in place.
        config: The section.

    Raises:
        ConfigError: A setting is unknown to the engine, or matches nothing in this model.
    """
    selection = layers.select(_SECTION, model, {nn.Linear: _misfit}, config)
    emulated = float8_products.emulated(config, run.world.device.type)
    selection.log(model, f"in float8 ({config.recipe}{', emulated' if emulated else ''})")
    gathered = _gathered(run, model, selection.chosen, config)
    replacements = {
        module: _converted(module, linear_config(config, name in gathered, emulated))
        for name, module in selection.chosen.items()
    }
    if replacements and run.config.compile is None and not emulated:
        _advise_to_compile()
    return layers.put_in_place(model, replacements), bool(gathered)


class AutocastFloat8Linear(Float8Linear):
    """The engine's layer, which follows autocast on any type of device; the engine looks at that of one type alone."""

    def forward(self, input: Tensor) -> Tensor:
        """As of ``nn.Linear``."""
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        output: Tensor = super().forward(input)
        return output


def _converted(linear: nn.Module, config: Float8LinearConfig) -> nn.Module:
    made: nn.Module = convert_to_float8_training(linear, config=config)
    made.__class__ = AutocastFloat8Linear
    return made


def _misfit(linear: nn.Linear) -> str | None:
    if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
        return f"whose in_features or out_features is no multiple of {_MULTIPLE}"
    return None


def _gathered(run: Run, model: nn.Module, chosen: Mapping[str, nn.Module], config: TorchaoConfig) -> set[str]:
    """Names of the layers whose weights are gathered in 8 bits.

    Not those shared with an embedding, say, which is no product; nor those whose rows the ranks can't share evenly,
    since the engine does not fill its pieces up.
    """
    if not float8_products.gathers(config, run.capabilities):
        return set()
    mesh = run.world.mesh
    ranks = run.world.size if mesh is None else mesh.size(mesh.ndim - 1)
    even = {name for name, module in chosen.items() if len(module.weight) % ranks == 0}
    gathered = even - layers.tied_to_others(model, chosen)
    if len(gathered) < len(chosen):
        logger.info(
            "%d weights are gathered in full precision: they are shared with other modules, or %d ranks can't share "
            "their rows evenly",
            len(chosen) - len(gathered),
            ranks,
        )
    return gathered


@functools.cache
def _advise_to_compile() -> None:
    """Say once: rounding and scaling, in operations of their own, cost more than 8-bit products save."""
    logger.info("float8 is faster than bfloat16 only where its layers are compiled; set compile: true")


def linear_config(config: TorchaoConfig, gathers: bool, emulated: bool) -> Float8LinearConfig:
    """The engine's configuration of a layer.

    Args:
        config: The section.
        gathers: Whether its weight is gathered in 8 bits.
        emulated: Whether products are computed in the compute dtype.

    Raises:
        ConfigError: The engine does not know an option, or refuses its value.
    """
    base: Any = config.linear_config
    options: dict[str, Any] = {}
    if base is None:
        base = Float8LinearConfig.from_recipe_name(config.recipe)
        options = {"pad_inner_dim": config.pad_inner_dim, **config.options}
    elif not isinstance(base, Float8LinearConfig):
        raise ConfigError(
            f"{_SECTION}.linear_config must be a torchao.float8.Float8LinearConfig, and is a {type(base).__name__}"
        )
    _check_options(config.options)
    options |= {"enable_fsdp_float8_all_gather": gathers, "emulate": emulated}
    try:
        return dataclasses.replace(base, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{_SECTION}: torchao refuses these settings ({options}): {error}") from error


_OWN_KEYS = {
    "emulate": "emulate",
    "enable_fsdp_float8_all_gather": "float8_all_gather",
    "pad_inner_dim": "pad_inner_dim",
}
"""Options of the engine that are keys of the section."""


def _check_options(options: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Float8LinearConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f". It has: {', '.join(known)}"
            raise ConfigError(f"{_SECTION}.options: torchao's Float8LinearConfig has no option {name!r}{hint}")
        if name in _OWN_KEYS:
            raise ConfigError(f"{_SECTION}.options.{name}: write {_SECTION}.{_OWN_KEYS[name]}")


def compute_scales(models: Sequence[nn.Module]) -> None:
    """Compute the scales of all weights that are gathered in 8 bits, in one reduction for each model. All ranks."""
    for model in models:
        precompute_float8_dynamic_scale_for_fsdp(model)
