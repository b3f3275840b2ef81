"""Files of Accelerate's that ask for sharding, translated into sections that are valid here."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.config.migration import translate
from drivetrain.config.reader import parse
from drivetrain.config.resolved import Resolved
from drivetrain.config.values import Origin
from drivetrain_fsdp import Fsdp, Fsdp1, Fsdp1Config, FsdpConfig

VERSION_1 = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Block,Other
  fsdp_use_orig_params: true
"""

VERSION_2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000
  fsdp_reshard_after_forward: false
  fsdp_offload_params: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
"""


def translated(text: str) -> tuple[list[str], Resolved]:
    file = parse(text, lambda mark: Origin("file", "old.yaml", mark.line + 1, mark.column + 1))
    assert file is not None
    found = translate(file)
    return [line.key for line in found.missing], Resolved(layers=(found.layer,))


def test_version_1() -> None:
    missing, resolved = translated(VERSION_1)
    assert (missing, resolved.run.backend) == ([], "fsdp1")
    assert resolved.section("fsdp1", Fsdp1.Config) == Fsdp1Config(
        activation_checkpointing=True,
        wrap_policy="transformer",
        backward_prefetch=None,
        cpu_ram_efficient_loading=True,
        cpu_offload=True,
        sharding_strategy="shard_grad_op",
        transformer_classes=["Block", "Other"],
    )


def test_version_2() -> None:
    missing, resolved = translated(VERSION_2)
    assert (missing, resolved.run.backend) == ([], "fsdp")
    assert resolved.section("fsdp", Fsdp.Config) == FsdpConfig(
        wrap_policy="size", min_num_params=1000, reshard_after_forward=False, state_dict_type="full"
    )


@pytest.mark.parametrize("number", ["1", "FULL_SHARD"])
def test_strategies_may_be_numbers(number: str) -> None:
    _, resolved = translated(f"distributed_type: FSDP\nfsdp_config: {{fsdp_sharding_strategy: {number}}}\n")
    config: Any = resolved.section("fsdp1", Fsdp1.Config)
    assert config.sharding_strategy == "full_shard"


def test_what_is_not_offered_is_named() -> None:
    missing, _ = translated(
        VERSION_1.replace("SHARDED_STATE_DICT", "LOCAL_STATE_DICT").replace("params: true", "params: x")
    )
    assert missing == ["fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_use_orig_params"]
