"""Files of Accelerate's that ask for ZeRO, translated into a section that is valid here."""

from __future__ import annotations

from drivetrain.config.migration import translate
from drivetrain.config.reader import parse
from drivetrain.config.resolved import Resolved
from drivetrain.config.values import Origin
from drivetrain_deepspeed import DeepSpeed, DeepSpeedConfig, OffloadConfig

THEIRS = """
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_optimizer_nvme_path: none
  offload_param_device: cpu
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_moe_layer_cls_names: Expert,Router
  deepspeed_multinode_launcher: standard
  deepspeed_hostfile: hosts
"""


def test_every_key_is_translated_or_named() -> None:
    file = parse(THEIRS, lambda mark: Origin("file", "old.yaml", mark.line + 1, mark.column + 1))
    assert file is not None
    found = translate(file)
    resolved = Resolved(layers=(found.layer,))
    assert [line.key for line in found.missing] == ["deepspeed_config.deepspeed_hostfile"]
    assert (resolved.run.backend, resolved.run.gradient_accumulation_steps) == ("deepspeed", 4)
    assert resolved.section("deepspeed", DeepSpeed.Config) == DeepSpeedConfig(
        gradient_clipping=1.0,
        offload_param=OffloadConfig(device="cpu"),
        zero3_init=False,
        zero3_save_16bit_model=True,
        zero_stage=3,
        leaf_modules=["Expert", "Router"],
    )
