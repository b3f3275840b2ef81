"""The section `deepspeed`, the plugin for code, and the engine's own file: choices, contradictions and places."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from drivetrain_deepspeed import DeepSpeed, DeepSpeedConfig, DeepSpeedPlugin, OffloadConfig


def test_importing_the_package_does_not_import_torch() -> None:
    script = (
        "import sys, drivetrain_deepspeed as d; d.DeepSpeedPlugin(zero_stage=3).settings(); "
        "d.DeepSpeed(d.DeepSpeedConfig()).capabilities; sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("config", [DeepSpeedConfig, OffloadConfig])
def test_every_setting_has_a_default_and_a_sentence_of_help(config: type) -> None:
    for field in attrs.fields(config):
        assert field.default is not attrs.NOTHING
        assert field.metadata["help"]


def test_capabilities_follow_from_the_stage() -> None:
    claims = {stage: DeepSpeed(DeepSpeedConfig(zero_stage=stage)).capabilities for stage in range(4)}
    assert [claims[stage].shards_params for stage in range(4)] == [False, False, False, True]
    assert [claims[stage].owns_scaler for stage in range(4)] == [False, True, True, True]
    assert [claims[stage].native_dtypes for stage in range(4)] == [frozenset()] + [{"bfloat16", "float16"}] * 3


def test_the_stage_is_the_sections_else_the_files_else_2() -> None:
    assert DeepSpeedConfig().stage == 2
    file = {"zero_optimization": {"stage": 3}}
    assert DeepSpeedConfig(config_file=file).stage == 3
    assert DeepSpeedConfig(config_file={"zero_optimization": {"stage": "auto"}}).stage == 2
    assert DeepSpeedConfig(config_file={"zero_optimization": {"stage": "auto"}}, zero_stage=1).stage == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 4}, "zero_stage must be 0"),
        ({"zero_stage": 2, "offload_param": OffloadConfig(device="cpu")}, "offload_param to cpu needs zero_stage 3"),
        ({"zero_stage": 0, "offload_optimizer": OffloadConfig(device="cpu")}, "needs zero_stage 1 and 2 and 3"),
        (
            {"zero_stage": 2, "offload_optimizer": OffloadConfig(device="nvme", nvme_path="x")},
            "to nvme needs zero_stage 3",
        ),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"grad_accum_dtype": "fp8"}, "grad_accum_dtype"),
        ({"config_file": {"zero_optimisation": {}}}, "did you mean 'zero_optimization'"),
        ({"config_file": {"zero_optimization": {"stag": 2}}}, "'zero_optimization.stag'.*did you mean 'stage'"),
        ({"config_file": {"zero_optimization": {"stage": 4}}}, "must be 0, 1, 2 or 3, got 4"),
        ({"config_file": {"zero_optimization": True}}, "must be an object"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "nvme"}, "needs nvme_path"),
        ({"device": "cpu", "nvme_path": "x"}, "no effect with device: cpu"),
        ({"device": "disk"}, "cpu, nvme, none"),
    ],
)
def test_an_offload_that_can_not_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadConfig(**settings)


# ----------------------------------------------------------------------------------------------------- the command


def check(folder: Path, section: str, file: str | None = None, command: str = "config check") -> tuple[int, str]:
    """``drivetrain config check`` on a YAML with that section, its file beside it."""
    (folder / "train.yaml").write_text(f"backend: deepspeed\ndeepspeed:\n{section}")
    if file is not None:
        (folder / "ds.json").write_text(file)
    words = [sys.executable, "-m", "drivetrain", *command.split(), "train.yaml"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).replace("\n", " ")


@pytest.mark.parametrize(
    ("section", "file", "messages"),
    [
        ("  zero_stag: 2\n", None, ["train.yaml:3:3: deepspeed.zero_stag: unknown key; did you mean 'zero_stage'"]),
        ("  zero_stage: 5\n", None, ["train.yaml:3:15: deepspeed.zero_stage"]),
        ("  config_file: missing.json\n", None, ["train.yaml:3:16: deepspeed.config_file: missing.json can't be read"]),
        ("  config_file: ds.json\n", '{"a": 1,\n "b": }', ["ds.json:2:7: no valid JSON"]),
        ("  config_file: ds.json\n", '{"fp16": {}, "fp16": {}}', ["has the key 'fp16' twice"]),
        ("  config_file: ds.json\n", "[1]", ["must hold one JSON object"]),
        (
            "  config_file: ds.json\n  zero_stage: 2\n  gradient_clipping: 1.0\n",
            '{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}',
            [
                "train.yaml:4:15: deepspeed.zero_stage: zero_stage is 2 here, and zero_optimization.stage in ds.json",
                "train.yaml:5:22: deepspeed.gradient_clipping: gradient_clipping is 1.0 here",
            ],
        ),
        (
            "  config_file: {zero_optimization: {stage: 2}}\n  offload_param: {device: cpu}\n",
            None,
            ["offload_param to cpu needs zero_stage 3, and this is stage 2"],
        ),
    ],
)
def test_mistakes_are_errors_at_their_place(
    tmp_path: Path, section: str, file: str | None, messages: list[str]
) -> None:
    code, output = check(tmp_path, section, file)
    assert code != 0
    for message in messages:
        assert message in output


# -------------------------------------------------------------------------------------------------------- for code


def test_the_plugin_names_the_section_and_chooses_the_backend() -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/nvme",
        offload_param_device="cpu",
        zero3_init_flag=False,
        gradient_accumulation_steps=4,
        transformer_moe_cls_names="Expert, Router",
        is_train_batch_min=False,
    )
    assert plugin.selects == "deepspeed"
    assert plugin.settings() == {
        "deepspeed.zero_stage": 3,
        "deepspeed.offload_optimizer.device": "nvme",
        "deepspeed.offload_optimizer.nvme_path": "/nvme",
        "deepspeed.offload_param.device": "cpu",
        "deepspeed.zero3_init": False,
        "deepspeed.leaf_modules": "Expert, Router",
        "deepspeed.train_batch_min": False,
        "gradient_accumulation_steps": 4,
    }


def test_the_plugins_file_decides_precision_and_accumulation_unless_they_are_given(tmp_path: Path) -> None:
    content = {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}, "gradient_accumulation_steps": 8}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    for source in (content, path, str(path), encoded):
        found = DeepSpeedPlugin(hf_ds_config=source).settings()
        assert (found["mixed_precision"], found["gradient_accumulation_steps"]) == ("bf16", 8)
    found = DeepSpeedPlugin(hf_ds_config=path, gradient_accumulation_steps=2).settings()
    assert found["gradient_accumulation_steps"] == 2


def test_the_plugin_writes_no_environment_variables() -> None:
    before = dict(os.environ)
    DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0).settings()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_stage": 7}, "zero_stage"),
        ({"offload_param_device": "cpu"}, "zero_stage 3"),
        ({"enable_msamp": True}, "MS-AMP"),
        ({"hf_ds_config": "nowhere.json"}, "can't be read"),
        ({"hf_ds_config": {"zero_optimization": {"stage": 3}}, "zero_stage": 1}, "zero_stage is 1 here"),
    ],
)
def test_the_plugin_refuses_what_the_section_would(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedPlugin(**arguments)


def test_drivetrain_hands_out_the_names_of_existing_scripts() -> None:
    import drivetrain

    assert drivetrain.DeepSpeedPlugin is DeepSpeedPlugin
    assert drivetrain.DummyOptim.__name__ == "DummyOptim"
    assert drivetrain.DummyScheduler.__name__ == "DummyScheduler"


# ------------------------------------------------------------------------------------------------------ the engine


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "needs deepspeed.*which is not installed"), ("0.9.0", "needs deepspeed.*but 0.9.0 is installed")],
)
def test_a_missing_or_wrong_engine_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    from drivetrain import registry, requirements
    from drivetrain.errors import PluginError

    real = requirements.installed_version
    monkeypatch.setattr(requirements, "installed_version", lambda name: version if name == "deepspeed" else real(name))
    registry.refresh()
    try:
        with pytest.raises(PluginError, match=message):
            registry.load(registry.find("backend", "deepspeed"))
    finally:
        registry.refresh()
