"""Sections ``fp8-te`` and ``fp8-torchao`` of the YAML."""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

import attrs

__all__ = ["LayersConfig", "TeConfig", "TeRecipe", "TorchaoConfig", "TorchaoRecipe"]

TeRecipe = Literal[
    "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"
]
TorchaoRecipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
_TeModule = Literal["Linear", "LayerNorm"]


def _as_names(value: Any) -> Any:
    """A list as a tuple; a text is a regular expression and stays one."""
    return value if value is None or isinstance(value, str) else tuple(value)


def _regex_or_list(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{attribute.name}: {value!r} is no regular expression: {error}") from None


def _callable_or_none(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not callable(value):
        raise ValueError(
            f"{attribute.name} is a function of a module and its name, given in code; to leave layers out by name, "
            f"use exclude"
        )


@attrs.frozen(kw_only=True)
class LayersConfig:
    """What both members have: which layers are converted, of those whose shapes fit."""

    exclude: list[str] | str | None = attrs.field(
        default=None,
        converter=_as_names,
        validator=_regex_or_list,
        metadata={
            "help": "layers that stay as they are: a list of names of modules, with all that is in them, or a regular "
            "expression that matches names in full"
        },
    )
    keep_first_and_last: bool = attrs.field(
        default=False,
        metadata={"help": "leave the first and the last Linear of a model as they are, which many models need most"},
    )
    filter: Any = attrs.field(
        default=None,
        validator=_callable_or_none,
        metadata={"help": "only in code: filter(module, name) says whether a layer is converted"},
    )


# ------------------------------------------------------------------------------------------------- Transformer Engine


@attrs.frozen(kw_only=True)
class TeConfig(LayersConfig):
    """Section ``fp8-te``: Transformer Engine."""

    recipe: TeRecipe | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.in_(typing.get_args(TeRecipe))),
        metadata={"help": "how values are scaled; null: what the engine takes for the GPU at hand"},
    )
    options: dict[str, Any] = attrs.field(
        factory=dict,
        metadata={"help": "options of the recipe by the engine's names, such as {amax_history_len: 16, margin: 0}"},
    )
    modules: list[_TeModule] = attrs.field(
        default=("Linear", "LayerNorm"),
        converter=_as_names,
        validator=attrs.validators.deep_iterable(attrs.validators.in_(typing.get_args(_TeModule))),
        metadata={"help": "kinds of layers that the engine's own take the place of"},
    )
    in_evaluation: bool = attrs.field(
        default=False,
        metadata={"help": "compute in 8 bits also while the model is in evaluation mode"},
    )

    def __attrs_post_init__(self) -> None:
        if self.options and self.recipe is None:
            raise ValueError(
                f"options ({', '.join(self.options)}) are those of a recipe, and none is named; name one: recipe: "
                f"{' | '.join(typing.get_args(TeRecipe))}"
            )
        if not self.modules:
            raise ValueError("modules names no kind of layers; choose from Linear, LayerNorm")


# ------------------------------------------------------------------------------------------------------------ torchao


@attrs.frozen(kw_only=True)
class TorchaoConfig(LayersConfig):
    """Section ``fp8-torchao``: torchao's float8 training."""

    recipe: TorchaoRecipe = attrs.field(
        default="tensorwise",
        validator=attrs.validators.in_(typing.get_args(TorchaoRecipe)),
        metadata={
            "help": "one scale for a tensor (tensorwise, the fastest), for each row (rowwise, more exact), or for each "
            "row with gradients of weights in full precision (rowwise_with_gw_hp, the most exact)"
        },
    )
    pad_inner_dim: bool = attrs.field(
        default=True,
        metadata={
            "help": "fill what products sum over up with zeros to a multiple of 16, so that batches may have any "
            "number of rows; without it an odd batch is an error of the device"
        },
    )
    float8_all_gather: bool | None = attrs.field(
        default=None,
        metadata={"help": "gather sharded weights in 8 bits; null: where the backend can and the recipe is tensorwise"},
    )
    precompute_scales: bool = attrs.field(
        default=True,
        metadata={
            "help": "with float8_all_gather: compute the scales of all weights at once after each step, not one by one "
            "before they are gathered"
        },
    )
    emulate: bool | None = attrs.field(
        default=None,
        metadata={
            "help": "round to 8 bits, but multiply in the compute dtype, which saves nothing; null: on the CPU, which "
            "has no such products"
        },
    )
    options: dict[str, Any] = attrs.field(
        factory=dict,
        metadata={
            "help": "more options of the engine's Float8LinearConfig, such as {round_scales_to_power_of_2: true}"
        },
    )
    linear_config: Any = attrs.field(
        default=None,
        metadata={"help": "only in code: a Float8LinearConfig, in place of recipe, pad_inner_dim and options"},
    )

    def __attrs_post_init__(self) -> None:
        if self.float8_all_gather and self.recipe != "tensorwise":
            raise ValueError(
                f"float8_all_gather: true needs recipe: tensorwise; with {self.recipe} a scale would have to be known "
                f"for each row of what other ranks hold"
            )
        if isinstance(self.linear_config, (str, int, float, list, dict)):
            raise ValueError(
                f"linear_config is a torchao.float8.Float8LinearConfig, given in code, and not {self.linear_config!r}; "
                f"in a file use recipe, pad_inner_dim and options"
            )
        if self.linear_config is not None:
            defaults = {"recipe": "tensorwise", "pad_inner_dim": True, "options": {}}
            given = [name for name, default in defaults.items() if getattr(self, name) != default]
            if given:
                raise ValueError(f"linear_config says it all, so {', '.join(given)} can't be given beside it")
