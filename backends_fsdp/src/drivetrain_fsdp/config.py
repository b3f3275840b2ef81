"""Sections ``fsdp`` and ``fsdp1`` of the YAML."""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

import attrs

__all__ = ["Fsdp1Config", "FsdpConfig", "MixedPrecision1Config", "MixedPrecisionConfig", "ShardingConfig"]

_Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_Strategy = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]

_a_dtype = attrs.validators.optional(attrs.validators.in_(typing.get_args(_Dtype)))
_positive = attrs.validators.optional(attrs.validators.ge(1))


# ----------------------------------------------------------------------------------------------------- mixed precision


@attrs.frozen(kw_only=True)
class MixedPrecisionConfig:
    """Section ``fsdp.mixed_precision_policy``: dtypes that the engine itself casts to, in place of autocast."""

    param_dtype: _Dtype | None = attrs.field(
        default=None,
        validator=_a_dtype,
        metadata={"help": "dtype of gathered parameters, and so of the computation; null: that of the parameters"},
    )
    reduce_dtype: _Dtype = attrs.field(
        default="float32",
        validator=attrs.validators.in_(typing.get_args(_Dtype)),
        metadata={"help": "dtype in which gradients are reduced over ranks"},
    )
    output_dtype: _Dtype | None = attrs.field(
        default=None,
        validator=_a_dtype,
        metadata={"help": "dtype of what the model returns; null: float32 with a param_dtype, else untouched"},
    )
    cast_forward_inputs: bool = attrs.field(
        default=True, metadata={"help": "cast floating-point inputs of each unit to param_dtype"}
    )

    @property
    def returned_dtype(self) -> str | None:
        """Dtype of the model's outputs; None leaves them."""
        return self.output_dtype or (None if self.param_dtype is None else "float32")


@attrs.frozen(kw_only=True)
class MixedPrecision1Config(MixedPrecisionConfig):
    """Section ``fsdp1.mixed_precision_policy``."""

    buffer_dtype: _Dtype | None = attrs.field(
        default=None, validator=_a_dtype, metadata={"help": "dtype of buffers, in saved states too; null: as they are"}
    )
    cast_root_forward_inputs: bool = attrs.field(
        default=True, metadata={"help": "cast inputs of the model as a whole, also without cast_forward_inputs"}
    )
    keep_low_precision_grads: bool = attrs.field(
        default=False, metadata={"help": "leave gradients in param_dtype for the optimizer"}
    )

    def __attrs_post_init__(self) -> None:
        if self.keep_low_precision_grads and self.param_dtype is None:
            raise ValueError("keep_low_precision_grads leaves gradients in param_dtype, which is not set; set it too")


# ---------------------------------------------------------------------------------------------------- what they share


def _as_names(value: Any) -> Any:
    """A list of names; a text with commas is split."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return None if value is None else tuple(value)


def _regex_or_list(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{attribute.name}: {value!r} is no regular expression: {error}") from None


@attrs.frozen(kw_only=True)
class ShardingConfig:
    """What both versions have."""

    wrap_policy: Literal["transformer", "size", "none"] | None = attrs.field(
        default=None,
        validator=attrs.validators.in_(("transformer", "size", "none", None)),
        metadata={
            "help": "which modules are gathered as units of their own: those of transformer_classes, those from "
            "min_num_params on, or none but the model as a whole; null: by which of these two is set, else by the "
            "model's _no_split_modules"
        },
    )
    transformer_classes: list[str] | str | None = attrs.field(
        default=None,
        converter=_as_names,
        metadata={"help": "class names of the modules that are units, as a list or a text with commas"},
    )
    min_num_params: int | None = attrs.field(
        default=None,
        validator=_positive,
        metadata={"help": "parameters a unit has at least, for wrap_policy: size; null: 100000000"},
    )
    replicate_size: int | None = attrs.field(
        default=None,
        validator=_positive,
        metadata={
            "help": "number of groups of ranks that each hold a whole model (HSDP); null: 1, or what shard_size leaves"
        },
    )
    shard_size: int | None = attrs.field(
        default=None,
        validator=_positive,
        metadata={"help": "number of ranks the model is cut over; null: all, or what replicate_size leaves"},
    )
    cpu_offload: bool = attrs.field(
        default=False,
        metadata={"help": "keep parameters, gradients and optimizer state in host memory between uses"},
    )
    ignored_modules: list[Any] | str | None = attrs.field(
        default=None,
        validator=_regex_or_list,
        metadata={
            "help": "modules that stay whole on each rank, their gradients averaged: a list of their names, or a "
            "regular expression that matches names in full"
        },
    )
    activation_checkpointing: bool = attrs.field(
        default=False,
        metadata={"help": "compute the activations of each unit again in backward instead of keeping them"},
    )
    state_dict_type: Literal["sharded", "full"] = attrs.field(
        default="sharded",
        validator=attrs.validators.in_(("sharded", "full")),
        metadata={
            "help": "how save_state writes models and optimizers: each rank its own pieces, or rank 0 all of it in "
            "the format that every backend reads"
        },
    )
    cpu_ram_efficient_loading: bool = attrs.field(
        default=False,
        metadata={
            "help": "build models under accelerator.init_context() on rank 0 alone; the others get pieces from there"
        },
    )
    sync_module_states: bool = attrs.field(
        default=True,
        metadata={
            "help": "start from rank 0's parameters and buffers; without it all ranks must have built the same model"
        },
    )

    def __attrs_post_init__(self) -> None:
        if self.wrap_policy == "none" and self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing works on the units that wrap_policy chooses, and none chooses none; set "
                "another wrap_policy"
            )
        if self.transformer_classes is not None and not self.transformer_classes:
            raise ValueError("transformer_classes names no class")
        for name, policy in (("transformer_classes", "transformer"), ("min_num_params", "size")):
            if getattr(self, name) is not None and self.policy != policy:
                raise ValueError(f"{name} has no effect with wrap_policy: {self.policy}; leave one of them out")
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise ValueError(
                "sync_module_states: false contradicts cpu_ram_efficient_loading: the other ranks have no values of "
                "their own"
            )

    @property
    def policy(self) -> str | None:
        """The wrap policy that was chosen, in words or by its setting; None leaves it to the model."""
        if self.wrap_policy is None and self.transformer_classes is not None:
            return "transformer"
        if self.wrap_policy is None and self.min_num_params is not None:
            return "size"
        return self.wrap_policy

    @property
    def cuts(self) -> bool:
        """Whether ranks hold parts of parameters."""
        return True


# --------------------------------------------------------------------------------------------------------- version 2


def _bool_or_ranks(instance: Any, attribute: Any, value: bool | int) -> None:
    if not isinstance(value, bool) and value < 2:
        raise ValueError(f"{attribute.name} must be true, false, or a number of ranks from 2 on; got {value}")


@attrs.frozen(kw_only=True)
class FsdpConfig(ShardingConfig):
    """Section ``fsdp``: torch's ``fully_shard``."""

    reshard_after_forward: bool | int = attrs.field(
        default=True,
        validator=_bool_or_ranks,
        metadata={
            "help": "free a unit's gathered parameters after its forward and gather them again in backward; a number: "
            "keep them cut over so many ranks in between"
        },
    )
    mixed_precision_policy: MixedPrecisionConfig | None = attrs.field(
        default=None, metadata={"help": "let the engine cast, instead of autocast as under every other backend"}
    )
    forward_prefetch: int = attrs.field(
        default=0,
        validator=attrs.validators.ge(0),
        metadata={"help": "units gathered ahead of the one being computed in forward; 0: what torch does by itself"},
    )
    backward_prefetch: int = attrs.field(
        default=0,
        validator=attrs.validators.ge(0),
        metadata={"help": "units gathered ahead of the one being computed in backward; 0: what torch does by itself"},
    )


# --------------------------------------------------------------------------------------------------------- version 1


def _only_true(instance: Any, attribute: Any, value: bool) -> None:
    if not value:
        raise ValueError(
            f"{attribute.name}: false is not offered: parameters flattened together have no names, so optimizer "
            f"groups, frozen parameters and checkpoints could not be told apart; leave it out"
        )


@attrs.frozen(kw_only=True)
class Fsdp1Config(ShardingConfig):
    """Section ``fsdp1``: torch's ``FullyShardedDataParallel``."""

    sharding_strategy: _Strategy | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.in_(typing.get_args(_Strategy))),
        metadata={
            "help": "what is cut and when it is gathered: all (full_shard); gathered once for forward and backward "
            "(shard_grad_op); nothing (no_shard); as the first two, within groups of ranks (hybrid_shard, "
            "hybrid_shard_zero2); null: full_shard, or hybrid_shard if sizes are given"
        },
    )
    mixed_precision_policy: MixedPrecision1Config | None = attrs.field(
        default=None, metadata={"help": "let the engine cast, instead of autocast as under every other backend"}
    )
    use_orig_params: bool = attrs.field(
        default=True,
        validator=_only_true,
        metadata={"help": "keep the user's parameters, with their names, visible"},
    )
    forward_prefetch: bool = attrs.field(
        default=False, metadata={"help": "gather the next unit while this one is computed in forward"}
    )
    backward_prefetch: Literal["backward_pre", "backward_post"] | None = attrs.field(
        default="backward_pre",
        validator=attrs.validators.in_(("backward_pre", "backward_post", None)),
        metadata={
            "help": "gather the next unit before or after this one's gradients are computed; null: when it is needed"
        },
    )
    limit_all_gathers: bool = attrs.field(default=True, metadata={"help": "gather at most two units at once"})

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        sizes = [name for name in ("replicate_size", "shard_size") if getattr(self, name) is not None]
        if sizes and not self.strategy.startswith("hybrid"):
            raise ValueError(
                f"{' and '.join(sizes)} need sharding_strategy: hybrid_shard or hybrid_shard_zero2, not "
                f"{self.sharding_strategy}"
            )

    @property
    def strategy(self) -> str:
        """The sharding strategy, chosen or by default."""
        sizes = self.replicate_size is not None or self.shard_size is not None
        return self.sharding_strategy or ("hybrid_shard" if sizes else "full_shard")

    @property
    def cuts(self) -> bool:
        """Whether ranks hold parts of parameters."""
        return self.strategy != "no_shard"
