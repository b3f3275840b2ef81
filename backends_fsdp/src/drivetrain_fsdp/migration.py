"""How configuration files of Accelerate's write the sections ``fsdp`` and ``fsdp1``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.plugin import Migration

__all__ = ["VERSION_1", "VERSION_2"]


def _common(section: str) -> dict[str, Any]:
    """Keys that mean the same for both versions."""
    same = {
        "fsdp_offload_params": "cpu_offload",
        "fsdp_transformer_layer_cls_to_wrap": "transformer_classes",
        "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
        "fsdp_activation_checkpointing": "activation_checkpointing",
        "fsdp_sync_module_states": "sync_module_states",
        "fsdp_ignored_modules": "ignored_modules",
    }
    return {
        **{theirs: f"{section}.{ours}" for theirs, ours in same.items()},
        "fsdp_version": {"*": {}},
        "fsdp_min_num_params": {"0": {}, "*": f"{section}.min_num_params"},
        "fsdp_use_orig_params": {"true": {}},
        "fsdp_auto_wrap_policy": _choices(
            f"{section}.wrap_policy",
            {"transformer_based_wrap": "transformer", "size_based_wrap": "size", "no_wrap": "none"},
        ),
        "fsdp_state_dict_type": _choices(
            f"{section}.state_dict_type", {"full_state_dict": "full", "sharded_state_dict": "sharded"}
        ),
    }


def _choices(key: str, names: Mapping[str, Any]) -> dict[str, Any]:
    return {theirs: {key: ours} for theirs, ours in names.items()}


_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""In the order in which they are numbered there, from 1 on."""

_STRATEGY_1 = _choices(
    "fsdp1.sharding_strategy",
    {
        **{name: name for name in _STRATEGIES},
        **{str(number): name for number, name in enumerate(_STRATEGIES, 1)},
        "_hybrid_shard_zero2": "hybrid_shard_zero2",
    },
)

_NOTES = {
    "fsdp_version": "the backend is of that version",
    "fsdp_use_orig_params": "parameters always keep their names here",
    "fsdp_state_dict_type": "sharded and full are offered",
}

VERSION_1 = Migration(
    section="fsdp_config",
    where={"distributed_type": ("fsdp",), "fsdp_config.fsdp_version": ("1", "")},
    keys={
        **_common("fsdp1"),
        "fsdp_sharding_strategy": _STRATEGY_1,
        "fsdp_reshard_after_forward": _STRATEGY_1,
        "fsdp_forward_prefetch": "fsdp1.forward_prefetch",
        "fsdp_backward_prefetch": _choices(
            "fsdp1.backward_prefetch",
            {"backward_pre": "backward_pre", "backward_post": "backward_post", "no_prefetch": "null"},
        ),
    },
    notes=_NOTES,
)

VERSION_2 = Migration(
    section="fsdp_config",
    where={"distributed_type": ("fsdp",), "fsdp_config.fsdp_version": ("2",)},
    keys={
        **_common("fsdp"),
        "fsdp_sharding_strategy": {
            **{name: {"fsdp.reshard_after_forward": True} for name in ("full_shard", "1")},
            **{name: {"fsdp.reshard_after_forward": False} for name in ("shard_grad_op", "2")},
        },
        "fsdp_reshard_after_forward": "fsdp.reshard_after_forward",
        "fsdp_forward_prefetch": {"true": {"fsdp.forward_prefetch": 1}, "false": {}},
        "fsdp_backward_prefetch": {"no_prefetch": {}},
    },
    notes={
        **_NOTES,
        "fsdp_sharding_strategy": "replicate_size and shard_size cut within groups of ranks",
        "fsdp_backward_prefetch": "backward_prefetch is a number of units here, and torch gathers one ahead by itself",
    },
)
