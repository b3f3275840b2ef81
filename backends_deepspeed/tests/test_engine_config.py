"""What the engine is told: the file, the section, and every `auto` filled in from the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from drivetrain.errors import ConfigError
from drivetrain.plugin import Policy
from drivetrain_deepspeed import DeepSpeedConfig, OffloadConfig
from drivetrain_deepspeed.engine_config import Setting, build, check_agreement, check_batches, disagreements
from drivetrain_deepspeed.engine_file import EngineFile

NO = Policy()
BF16 = Policy(compute="bfloat16")
FP16 = Policy(compute="float16", loss_scale="dynamic", scaler_options={"init_scale": 1024.0, "growth_interval": 7})


def told(policy: Policy = NO, model: nn.Module | None = None, trains: bool = True, **section: Any) -> Any:
    return build(DeepSpeedConfig(**section), policy, model or nn.Linear(1, 1), trains=trains, optimizer=None)


def hidden(**config: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**config)
    return model


def test_the_engine_accumulates_and_clips_nothing_itself() -> None:
    file = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4, "train_batch_size": 64}
    made = told(config_file=file)
    assert made["gradient_clipping"] == 0.0
    assert made["gradient_accumulation_steps"] == made["train_micro_batch_size_per_gpu"] == 1
    assert "train_batch_size" not in made
    assert DeepSpeedConfig(config_file=file).clipping == 0.5
    assert DeepSpeedConfig(config_file={"gradient_clipping": "auto"}).clipping == 0.0


def test_the_section_reaches_the_engines_own_names() -> None:
    made = told(
        zero_stage=3,
        offload_optimizer=OffloadConfig(device="cpu", pin_memory=True),
        param_persistence_threshold=10,
        prefetch_bucket_size=20,
        leaf_modules="A, B",
        grad_accum_dtype="fp32",
        zero3_save_16bit_model=True,
        config_file={"zero_optimization": {"sub_group_size": 30}, "wall_clock_breakdown": True},
    )
    assert made["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_param_persistence_threshold": 10,
        "stage3_prefetch_bucket_size": 20,
        "leaf_module": {"classes": ["A", "B"]},
        "stage3_gather_16bit_weights_on_model_save": True,
        "sub_group_size": 30,
    }
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["wall_clock_breakdown"] is True


def test_precision_is_the_runs() -> None:
    auto = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "hysteresis": 2, "loss_scale_window": "auto"}}
    assert not {"bf16", "fp16"} & set(told(config_file=auto))
    assert told(BF16, config_file=auto)["bf16"] == {"enabled": True}
    assert told(FP16, config_file=auto)["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": 7,
        "hysteresis": 2,
    }
    assert told(Policy(compute="float16", loss_scale=128.0))["fp16"] == {"enabled": True, "loss_scale": 128.0}


def test_at_stage_0_core_computes_in_half_precision() -> None:
    assert not {"bf16", "fp16"} & set(told(FP16, zero_stage=0))


def test_a_model_that_is_not_trained_is_cut_at_stage_3_only() -> None:
    assert told(trains=False, zero_stage=2)["zero_optimization"]["stage"] == 0
    assert told(trains=False, zero_stage=3)["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64},
        {"hidden_sizes": [16, 64]},
        {"d_model": 64},
        {"text_config": SimpleNamespace(hidden_size=64)},
    ],
    ids=["hidden_size", "hidden_sizes", "d_model", "text_config"],
)
def test_buffer_sizes_follow_from_the_hidden_size(config: dict[str, Any]) -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    made = told(model=hidden(**config), config_file={"zero_optimization": zero})["zero_optimization"]
    assert made["reduce_bucket_size"] == 64 * 64
    assert made["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert made["stage3_param_persistence_threshold"] == 640


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "Linear has no config.hidden_size"),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "auto for zero_optimization.sub_group_size, which nothing"),
        ({"tensorboard": {"enabled": "auto"}}, "auto for tensorboard.enabled"),
    ],
)
def test_an_auto_that_nothing_decides_is_named(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        told(config_file=file)


def test_gradients_are_reduced_in_the_precisions_dtype() -> None:
    assert told(Policy(reduce="float32"))["communication_data_type"] == "fp32"
    with pytest.raises(ConfigError, match="communication_data_type is bf16, but"):
        told(Policy(reduce="float32"), communication_data_type="bf16")
    with pytest.raises(ConfigError, match="can't reduce gradients in float8"):
        told(Policy(reduce="float8_e4m3fn"))


def test_overlapping_at_stage_1_is_turned_off_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert told(zero_stage=1, overlap_comm=True)["zero_optimization"]["overlap_comm"] is False
    assert "no effect at stage 1" in caplog.text
    assert told(zero_stage=2, overlap_comm=True)["zero_optimization"]["overlap_comm"] is True


# --------------------------------------------------------------------------------------------------------- agreement


def compare(content: dict[str, Any], compute: str | None, steps: int = 1) -> None:
    file = EngineFile(content, "ds.json")
    precision = Setting(key="mixed_precision", value="no" if compute is None else "bf16", origin="train.yaml:3")
    accumulation = Setting(key="gradient_accumulation_steps", value=steps, origin="Accelerator(...)")
    check_agreement(file, disagreements(file, compute=compute, precision=precision, accumulation=accumulation))


def test_every_disagreement_is_listed_with_both_values_and_their_origins() -> None:
    with pytest.raises(ConfigError) as raised:
        compare({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}, None, 2)
    assert str(raised.value).splitlines()[1:3] == [
        "  bf16.enabled is true in ds.json, and mixed_precision is no (train.yaml:3)",
        "  gradient_accumulation_steps is 4 in ds.json, and gradient_accumulation_steps is 2 (Accelerator(...))",
    ]


@pytest.mark.parametrize(
    ("content", "compute", "steps"),
    [
        ({}, None, 4),
        ({"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto"}, "bfloat16", 4),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 4}, "bfloat16", 4),
    ],
)
def test_what_agrees_passes(content: dict[str, Any], compute: str | None, steps: int) -> None:
    compare(content, compute, steps)


@pytest.mark.parametrize(
    ("content", "micro", "message"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, 4, "is 2 in ds.json, and the prepared loader gives batches of 4"),
        ({"train_batch_size": 10}, 4, "4 samples x 2 micro-batches x 3 processes are 24"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2}, None, "2 samples x 2 micro-batches x 3"),
    ],
)
def test_batch_sizes_that_do_not_multiply_are_refused(content: dict[str, Any], micro: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_batches(EngineFile(content, "ds.json"), micro=micro, steps=2, processes=3)


def test_batch_sizes_that_are_auto_are_filled_in() -> None:
    content = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    check_batches(EngineFile(content), micro=4, steps=2, processes=3)
    check_batches(EngineFile({"train_batch_size": 24}), micro=4, steps=2, processes=3)
