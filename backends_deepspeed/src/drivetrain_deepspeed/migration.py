"""How configuration files of Accelerate's write the section ``deepspeed``."""

from __future__ import annotations

from typing import Any

from drivetrain.plugin import Migration

__all__ = ["MIGRATION"]


def _unless(nothing: str, key: str) -> dict[str, Any]:
    return {nothing: {}, "*": key}


_LAUNCHING = "several machines: start drivetrain launch on each, or the engine's own launcher with its hostfile"

MIGRATION = Migration(
    section="deepspeed_config",
    where={"distributed_type": ("deepspeed",)},
    keys={
        "deepspeed_config_file": "deepspeed.config_file",
        "zero_stage": "deepspeed.zero_stage",
        "gradient_accumulation_steps": _unless("auto", "gradient_accumulation_steps"),
        "gradient_clipping": _unless("auto", "deepspeed.gradient_clipping"),
        "offload_optimizer_device": _unless("none", "deepspeed.offload_optimizer.device"),
        "offload_optimizer_nvme_path": _unless("none", "deepspeed.offload_optimizer.nvme_path"),
        "offload_param_device": _unless("none", "deepspeed.offload_param.device"),
        "offload_param_nvme_path": _unless("none", "deepspeed.offload_param.nvme_path"),
        "zero3_init_flag": "deepspeed.zero3_init",
        "zero3_save_16bit_model": "deepspeed.zero3_save_16bit_model",
        "deepspeed_moe_layer_cls_names": "deepspeed.leaf_modules",
        "deepspeed_multinode_launcher": {"standard": {}},
    },
    notes={
        "deepspeed_multinode_launcher": _LAUNCHING,
        "deepspeed_hostfile": _LAUNCHING,
        "deepspeed_inclusion_filter": _LAUNCHING,
        "deepspeed_exclusion_filter": _LAUNCHING,
    },
)
