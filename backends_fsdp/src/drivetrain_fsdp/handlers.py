"""The sections ``fsdp`` and ``fsdp1`` given in code, under the names that existing scripts use."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler
from drivetrain_fsdp.config import Fsdp1Config, FsdpConfig, MixedPrecision1Config, MixedPrecisionConfig

__all__ = ["FullyShardedDataParallelPlugin"]

_WRAP_POLICIES = {
    "TRANSFORMER_BASED_WRAP": "transformer",
    "SIZE_BASED_WRAP": "size",
    "NO_WRAP": "none",
}
_STATE_DICT_TYPES = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}
_STRATEGIES = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
_PREFETCHES = {"BACKWARD_PRE": "backward_pre", "BACKWARD_POST": "backward_post", "NO_PREFETCH": None}


def _choice(field: str, names: Mapping[str, str], value: Any) -> str | None:
    """The section's word for what scripts call by one of ``names``, or give as a member of torch's enumerations."""
    if value is None:
        return None
    text = value.name if isinstance(value, enum.Enum) else str(value)
    if text in names.values():
        return text
    if text.upper() not in names:
        raise ValueError(f"{field}={value!r} is none of: {', '.join(names)}")
    return names[text.upper()]


def _strategy(value: Any) -> str | None:
    return _choice("sharding_strategy", _STRATEGIES, value)


def _wrap_policy(value: Any) -> str | None:
    if callable(value):
        raise ValueError(
            "auto_wrap_policy can't be a function, which no YAML could hold; name classes in "
            "transformer_cls_names_to_wrap, or give min_num_params"
        )
    return _choice("auto_wrap_policy", _WRAP_POLICIES, value)


def _state_dict_type(value: Any) -> str | None:
    return _choice("state_dict_type", _STATE_DICT_TYPES, value)


def _switch(value: Any) -> Any:
    """A bool, or torch's objects that stand for one."""
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "offload_params"):
        return value.offload_params
    if type(value).__name__ in ("CPUOffloadPolicy", "OffloadPolicy"):
        return type(value).__name__ == "CPUOffloadPolicy"
    raise TypeError(f"cpu_offload must be a bool or torch's CPUOffload or CPUOffloadPolicy, got {value!r}")


def _class_names(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return [each.__name__ if isinstance(each, type) else each for each in value]


def _version(value: Any) -> int:
    if value not in (None, 1, 2):
        raise ValueError(f"fsdp_version must be 1 (FullyShardedDataParallel) or 2 (fully_shard), got {value!r}")
    return value or 2


_ONLY_IN = {
    "sharding_strategy": (
        1,
        "reshard_after_forward=True is FULL_SHARD, False is SHARD_GRAD_OP, replicate_size cuts within groups",
    ),
    "use_orig_params": (1, "parameters keep their names always"),
    "limit_all_gathers": (1, "gathering is limited always"),
}

_WHOLE_STATES = "a whole state is always made on the CPU of rank 0; state_dict_type says whether save_state writes one"
_NOT_OFFERED = {
    "param_init_fn": "cpu_ram_efficient_loading=True builds models on rank 0 alone, under accelerator.init_context()",
    "state_dict_config": _WHOLE_STATES,
    "optim_state_dict_config": _WHOLE_STATES,
}


@attrs.frozen(kw_only=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Sharding given in code: ``Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(...))``.

    It chooses the backend too. It only describes: it reads and writes no environment variables, and may be used for any
    number of runs.

    Attributes:
        fsdp_version: 2 (the default) for backend ``fsdp``, 1 for ``fsdp1``.
        sharding_strategy: What is cut; version 1.
        reshard_after_forward: Whether gathered parameters are freed after forward. Version 2 also takes a number of
            ranks, version 1 also the name of a sharding strategy.
        backward_prefetch: Version 1: ``"BACKWARD_PRE"``, ``"BACKWARD_POST"`` or ``"NO_PREFETCH"``. Version 2: a number
            of units.
        forward_prefetch: Version 1: whether; version 2: a number of units, or whether to gather one ahead.
        mixed_precision_policy: A dict, or torch's ``MixedPrecision`` or ``MixedPrecisionPolicy``.
        auto_wrap_policy: ``"TRANSFORMER_BASED_WRAP"``, ``"SIZE_BASED_WRAP"`` or ``"NO_WRAP"``.
        transformer_cls_names_to_wrap: Classes or their names, a list or a text with commas.
        min_num_params: Parameters a unit has at least.
        cpu_offload: Keep what is not in use in host memory.
        ignored_modules: Modules that stay whole: themselves or their names in a list, or a regular expression.
        activation_checkpointing: Compute activations again in backward.
        state_dict_type: ``"FULL_STATE_DICT"`` or ``"SHARDED_STATE_DICT"``.
        cpu_ram_efficient_loading: Build models on rank 0 alone.
        sync_module_states: Start from rank 0's values.
        use_orig_params: Version 1; False is refused.
        limit_all_gathers: Version 1.
        replicate_size: Number of groups that each hold the whole model.
        shard_size: Number of ranks in such a group.
        param_init_fn: Refused, with what does the same here; so are ``state_dict_config`` and
            ``optim_state_dict_config``.

    None, everywhere: as configured outside the code.

    Raises:
        TypeError: A value is of a kind that is not known.
        ValueError: A value is no choice, two contradict each other, or the version has no such option.
    """

    section: ClassVar[str] = "fsdp"  # of version 2; `settings` knows both

    fsdp_version: int = attrs.field(default=None, converter=_version)
    sharding_strategy: Any = attrs.field(default=None, converter=_strategy)
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    forward_prefetch: bool | int | None = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = attrs.field(default=None, converter=_wrap_policy)
    transformer_cls_names_to_wrap: Sequence[Any] | str | None = attrs.field(default=None, converter=_class_names)
    min_num_params: int | None = None
    cpu_offload: Any = attrs.field(default=None, converter=_switch)
    ignored_modules: Any = None
    activation_checkpointing: bool | None = None
    state_dict_type: Any = attrs.field(default=None, converter=_state_dict_type)
    cpu_ram_efficient_loading: bool | None = None
    sync_module_states: bool | None = None
    use_orig_params: bool | None = None
    limit_all_gathers: bool | None = None
    replicate_size: int | None = None
    shard_size: int | None = None
    param_init_fn: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None

    def __attrs_post_init__(self) -> None:
        for name, instead in _NOT_OFFERED.items():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not offered; {instead}")
        for name, (version, instead) in _ONLY_IN.items():
            if getattr(self, name) is not None and self.fsdp_version != version:
                raise ValueError(
                    f"{name} is an option of fsdp_version={version}; in version {self.fsdp_version} {instead}"
                )
        values = self.values()
        policy = _MIXED_PRECISIONS[self.fsdp_version](**values.pop("mixed_precision_policy", {}))
        _SECTIONS[self.fsdp_version](**values, mixed_precision_policy=policy)  # finds whatever contradicts

    @property
    def selects(self) -> str:  # type: ignore[override]  # decided by the instance
        """The backend of this version."""
        return "fsdp" if self.fsdp_version == 2 else "fsdp1"

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the section's names."""
        given = super().values()
        del given["fsdp_version"]
        _rename(given, "auto_wrap_policy", "wrap_policy")
        _rename(given, "transformer_cls_names_to_wrap", "transformer_classes")
        if "mixed_precision_policy" in given:
            given["mixed_precision_policy"] = _dtypes(
                given["mixed_precision_policy"], _MIXED_PRECISIONS[self.fsdp_version]
            )
        (_as_version_2 if self.fsdp_version == 2 else _as_version_1)(given)
        return given

    def settings(self) -> dict[str, Any]:
        """The explicitly given fields as configuration keys."""
        given = self.values()
        nested = given.pop("mixed_precision_policy", {})
        given |= {f"mixed_precision_policy.{name}": value for name, value in nested.items()}
        return {f"{self.selects}.{name}": value for name, value in given.items()}


_SECTIONS: Mapping[int, type[Any]] = {1: Fsdp1Config, 2: FsdpConfig}
_MIXED_PRECISIONS: Mapping[int, type[MixedPrecisionConfig]] = {1: MixedPrecision1Config, 2: MixedPrecisionConfig}


def _rename(given: dict[str, Any], old: str, new: str) -> None:
    if old in given:
        given[new] = given.pop(old)


def _as_version_2(given: dict[str, Any]) -> None:
    reshard = given.get("reshard_after_forward", True)
    if not isinstance(reshard, int):
        raise ValueError(f"reshard_after_forward={reshard!r}: fsdp_version=2 takes True, False or a number of ranks")
    prefetch = given.get("backward_prefetch", 0)
    if not isinstance(prefetch, int):
        raise ValueError(
            f"backward_prefetch={prefetch!r} is an option of fsdp_version=1; version 2 takes a number of units"
        )
    for name in ("forward_prefetch", "backward_prefetch"):
        if name in given:
            given[name] = int(given[name])


def _as_version_1(given: dict[str, Any]) -> None:
    reshard = given.pop("reshard_after_forward", None)
    if reshard is not None:
        named = {True: "full_shard", False: "shard_grad_op"}.get(reshard)
        strategy = named or _STRATEGIES.get(str(getattr(reshard, "name", reshard)).upper())
        if strategy is None or given.setdefault("sharding_strategy", strategy) != strategy:
            raise ValueError(
                f"reshard_after_forward={reshard!r} must be True, False or the name of a sharding strategy in "
                f"fsdp_version=1, and agree with sharding_strategy={given.get('sharding_strategy')!r}"
            )
    if "backward_prefetch" in given:
        prefetch = given["backward_prefetch"]
        text = str(getattr(prefetch, "name", prefetch)).upper()
        if text not in _PREFETCHES:
            raise ValueError(f"backward_prefetch={prefetch!r} is none of: {', '.join(_PREFETCHES)}")
        given["backward_prefetch"] = _PREFETCHES[text]


def _dtypes(policy: Any, config: type[MixedPrecisionConfig]) -> dict[str, Any]:
    """A policy's values by name, dtypes by theirs."""
    known = [field.name for field in attrs.fields(config)]
    if isinstance(policy, Mapping):
        found = dict(policy)
    else:
        own = [name for name in getattr(policy, "__dict__", ()) if not name.startswith("_")]
        found = {name: getattr(policy, name) for name in [*known, *own] if hasattr(policy, name)}
        if not found:
            raise TypeError(f"mixed_precision_policy must be a dict or one of torch's policies, got {policy!r}")
        # In torch's objects None means that gradients are reduced in the dtype they have.
        found["reduce_dtype"] = found.get("reduce_dtype") or found.get("param_dtype")
    if unknown := [name for name in found if name not in known]:
        kind = "" if isinstance(policy, Mapping) else f"; torch's {type(policy).__name__} is of the other fsdp_version"
        raise ValueError(
            f"mixed_precision_policy has no {', '.join(map(repr, unknown))}{kind}; it has {', '.join(known)}"
        )
    return {
        name: value if isinstance(value, bool) else str(value).removeprefix("torch.")
        for name, value in found.items()
        if value is not None
    }
