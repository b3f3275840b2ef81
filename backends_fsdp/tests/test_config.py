"""The sections `fsdp` and `fsdp1`, and the plugin for code: choices, contradictions and names."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from typing import Any

import attrs
import pytest

from drivetrain_fsdp import (
    Fsdp,
    Fsdp1,
    Fsdp1Config,
    FsdpConfig,
    FullyShardedDataParallelPlugin,
    MixedPrecision1Config,
    MixedPrecisionConfig,
)

SECTIONS = [FsdpConfig, Fsdp1Config]


def test_importing_the_package_does_not_import_torch() -> None:
    script = (
        "import sys, drivetrain_fsdp as f; f.FullyShardedDataParallelPlugin(fsdp_version=1).settings(); "
        "f.Fsdp(f.FsdpConfig()).capabilities; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("config", [*SECTIONS, MixedPrecisionConfig, MixedPrecision1Config])
def test_every_setting_has_a_default_and_a_sentence_of_help(config: type) -> None:
    for field in attrs.fields(config):
        assert field.default is not attrs.NOTHING
        assert field.metadata["help"]


def test_capabilities_follow_from_the_section() -> None:
    plain = Fsdp().capabilities
    assert (plain.shards_params, plain.resharding, plain.one_process) == (True, True, False)
    assert (plain.distributed_type, plain.native_dtypes) == ("FSDP", frozenset())
    assert "all_gather_extensions" in plain.features
    assert "all_gather_extensions" not in Fsdp1().capabilities.features
    native = FsdpConfig(mixed_precision_policy=MixedPrecisionConfig(param_dtype="bfloat16"))
    assert Fsdp(native).capabilities.native_dtypes == {"bfloat16"}
    assert not Fsdp1(Fsdp1Config(sharding_strategy="no_shard")).capabilities.shards_params


@pytest.mark.parametrize("config", SECTIONS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wrap_policy": "XYZ"}, "wrap_policy"),
        ({"wrap_policy": "none", "activation_checkpointing": True}, "activation_checkpointing.*wrap_policy"),
        ({"wrap_policy": "size", "transformer_classes": ["A"]}, "transformer_classes has no effect"),
        ({"transformer_classes": "A", "min_num_params": 5}, "min_num_params has no effect"),
        ({"transformer_classes": " , "}, "names no class"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "sync_module_states: false contradicts"),
        ({"ignored_modules": "["}, "no regular expression"),
        ({"replicate_size": 0}, "replicate_size"),
        ({"state_dict_type": "local"}, "state_dict_type"),
    ],
)
def test_contradictions_are_refused(config: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (FsdpConfig, {"reshard_after_forward": 1}, "from 2 on"),
        (FsdpConfig, {"forward_prefetch": -1}, "forward_prefetch"),
        (Fsdp1Config, {"use_orig_params": False}, "use_orig_params: false is not offered"),
        (
            Fsdp1Config,
            {"sharding_strategy": "full_shard", "shard_size": 2},
            "shard_size need sharding_strategy: hybrid",
        ),
        (Fsdp1Config, {"sharding_strategy": "zero3"}, "sharding_strategy"),
        (MixedPrecisionConfig, {"param_dtype": "fp8"}, "param_dtype"),
        (MixedPrecision1Config, {"keep_low_precision_grads": True}, "in param_dtype, which is not set"),
    ],
)
def test_what_a_version_cannot_do_is_refused(config: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ("fsdp", "limit_all_gathers: true", "train.yaml:3:3: fsdp.limit_all_gathers: unknown key"),
        ("fsdp1", "reshard_after_forward: true", "train.yaml:3:3: fsdp1.reshard_after_forward: unknown key"),
        (
            "fsdp",
            "mixed_precision_policy: {param_dtype: fp8}",
            "train.yaml:3:41: fsdp.mixed_precision_policy.param_dtype",
        ),
        ("fsdp1", "wrap_policy: transformers", "train.yaml:3:16: fsdp1.wrap_policy"),
    ],
)
def test_yaml_of_the_other_version_is_an_error_at_its_line(tmp_path: Any, config: str, text: str, message: str) -> None:
    (tmp_path / "train.yaml").write_text(f"backend: {config}\n{config}:\n  {text}\n")
    command = [sys.executable, "-m", "drivetrain", "config", "check", "train.yaml"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert checked.returncode != 0
    assert message in (checked.stdout + checked.stderr).replace("\n", " ")


def test_a_policy_is_chosen_by_its_setting() -> None:
    assert FsdpConfig(transformer_classes="A, B").transformer_classes == ("A", "B")
    assert FsdpConfig(transformer_classes="A").policy == "transformer"
    assert FsdpConfig(min_num_params=5).policy == "size"
    assert FsdpConfig().policy is None


# ------------------------------------------------------------------------------------------------------------ in code


class ShardingStrategy(enum.Enum):
    SHARD_GRAD_OP = 2


class Policy:
    """As torch's: attributes, and dtypes that print as theirs do."""

    param_dtype = "torch.bfloat16"
    reduce_dtype = None
    output_dtype = None
    cast_forward_inputs = True


class Layer:
    pass


def test_a_plugin_gives_only_what_was_said_and_chooses_the_backend() -> None:
    assert FullyShardedDataParallelPlugin().settings() == {}
    assert FullyShardedDataParallelPlugin().selects == "fsdp"
    assert FullyShardedDataParallelPlugin(fsdp_version=1).selects == "fsdp1"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=[Layer, "Other"],
        state_dict_type="FULL_STATE_DICT",
        mixed_precision_policy=Policy(),
        forward_prefetch=True,
        cpu_offload=False,
    )
    assert plugin.settings() == {
        "fsdp.reshard_after_forward": False,
        "fsdp.wrap_policy": "transformer",
        "fsdp.transformer_classes": ["Layer", "Other"],
        "fsdp.state_dict_type": "full",
        "fsdp.mixed_precision_policy.param_dtype": "bfloat16",
        "fsdp.mixed_precision_policy.reduce_dtype": "bfloat16",
        "fsdp.mixed_precision_policy.cast_forward_inputs": True,
        "fsdp.forward_prefetch": 1,
        "fsdp.cpu_offload": False,
    }


def test_a_plugin_of_version_1_translates_strategies_and_prefetching() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        reshard_after_forward=False,
        backward_prefetch="NO_PREFETCH",
        limit_all_gathers=False,
    )
    assert plugin.settings() == {
        "fsdp1.sharding_strategy": "shard_grad_op",
        "fsdp1.backward_prefetch": None,
        "fsdp1.limit_all_gathers": False,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_wrap_policy": "XYZ"}, "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP"),
        ({"auto_wrap_policy": lambda *_: True}, "can't be a function.*transformer_cls_names_to_wrap"),
        ({"auto_wrap_policy": "NO_WRAP", "activation_checkpointing": True}, "activation_checkpointing.*wrap_policy"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "FULL_STATE_DICT, SHARDED_STATE_DICT"),
        ({"fsdp_version": 3}, "fsdp_version must be 1"),
        ({"sharding_strategy": "FULL_SHARD"}, "option of fsdp_version=1"),
        ({"use_orig_params": True}, "option of fsdp_version=1"),
        ({"limit_all_gathers": True}, "option of fsdp_version=1"),
        ({"backward_prefetch": "BACKWARD_PRE"}, "option of fsdp_version=1"),
        ({"reshard_after_forward": "FULL_SHARD"}, "fsdp_version=2 takes True, False"),
        ({"fsdp_version": 1, "sharding_strategy": "NO_SHARD", "reshard_after_forward": True}, "agree with"),
        ({"fsdp_version": 1, "use_orig_params": False}, "use_orig_params: false is not offered"),
        ({"param_init_fn": Layer}, "param_init_fn is not offered; cpu_ram_efficient_loading=True"),
        ({"state_dict_config": Policy()}, "state_dict_config is not offered; .* CPU of rank 0"),
        ({"fsdp_version": 1, "optim_state_dict_config": Policy()}, "optim_state_dict_config is not offered"),
        ({"mixed_precision_policy": {"param": "bfloat16"}}, "has no 'param'"),
        ({"mixed_precision_policy": {"buffer_dtype": "bfloat16"}}, "has no 'buffer_dtype'"),
    ],
)
def test_a_plugin_refuses_what_its_version_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallelPlugin(**options)


def test_torchs_policies_are_those_of_their_version() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    older, newer = fsdp.MixedPrecision(cast_root_forward_inputs=False), fsdp.MixedPrecisionPolicy()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, mixed_precision_policy=older)
    assert plugin.settings() == {
        "fsdp1.mixed_precision_policy.keep_low_precision_grads": False,
        "fsdp1.mixed_precision_policy.cast_forward_inputs": False,
        "fsdp1.mixed_precision_policy.cast_root_forward_inputs": False,
    }
    FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=newer)
    with pytest.raises(ValueError, match="no 'buffer_dtype', .*; torch's MixedPrecision is of the other fsdp_version"):
        FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=older)


def test_a_plugin_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True).fsdp_version == 2
    monkeypatch.delenv("FSDP_VERSION")
    assert dict(os.environ) == before


def in_code() -> tuple[str, str, bool]:
    from torch import nn

    import drivetrain
    from drivetrain import Accelerator

    plugin = drivetrain.FullyShardedDataParallelPlugin(fsdp_version=1, min_num_params=10)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return accelerator.run.names["backend"], str(accelerator.distributed_type), type(model[0]).__name__ == "ShardedUnit"


def test_a_plugin_in_code_wins_over_the_file(worker_pool: Any) -> None:
    config = {"backend": "ddp", "fsdp1": {"wrap_policy": "size", "min_num_params": 1000}}
    for backend, kind, unit in worker_pool(2).run(in_code, config=config):
        assert (backend, unit) == ("fsdp1", True)
        assert kind.endswith("FSDP")
