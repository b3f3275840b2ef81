"""The family ``fp8``: which member is taken, what is said against the others, and the settings of existing scripts."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import attrs
import pytest

from drivetrain import Accelerator, AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs, registry, state
from drivetrain.errors import DrivetrainError, EngineError, PluginError
from drivetrain.plugin import Capabilities
from drivetrain_fp8 import Fp8Te, Fp8Torchao, TeConfig, TorchaoConfig, te_availability

torchao = pytest.mark.skipif(
    not registry.load_all("precision")[0].get("fp8-torchao"), reason="torchao is not installed: pip install torchao"
)


def test_importing_the_package_imports_neither_torch_nor_an_engine() -> None:
    script = "import sys, drivetrain_fp8; sys.exit(bool({'torch', 'torchao', 'transformer_engine'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("config", [TeConfig, TorchaoConfig])
def test_every_setting_has_a_default_and_a_sentence_of_help(config: type) -> None:
    for field in attrs.fields(config):
        assert field.default is not attrs.NOTHING
        assert field.metadata["help"]


# -------------------------------------------------------------------------------------------------------- the choice


@torchao
def test_the_family_is_torchao_on_a_cpu_and_says_why(
    configured: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Fp8Te, "requires", ())  # as if the engine were installed
    registry.refresh()
    assert configured("fp8").run.names["precision"] == "fp8-torchao"
    assert "precision 'fp8-te' (drivetrain-fp8 0.1.0): Transformer Engine computes on NVIDIA GPUs" in caplog.text
    assert "mixed_precision: fp8 is precision 'fp8-torchao' (drivetrain-fp8 0.1.0) here" in caplog.text
    registry.refresh()


def test_transformer_engine_comes_first_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Te, "requires", ())
    monkeypatch.setattr(Fp8Torchao, "requires", ())
    monkeypatch.setattr(te_availability, "reason_against", lambda device_type, recipe: None)
    registry.refresh()
    entry, _ = registry.resolve_precision("fp8", "cuda", Capabilities())
    assert entry.name == "fp8-te"
    entry, _ = registry.resolve_precision("fp8", "cpu", Capabilities(), configured=("fp8-torchao",))
    assert entry.name == "fp8-torchao"
    registry.refresh()


def test_the_family_without_engines_says_what_each_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugin in (Fp8Te, Fp8Torchao):
        monkeypatch.setattr(plugin, "requires", ("no-such-engine-xyz>=2",))
    registry.refresh()
    with pytest.raises(
        PluginError, match=r"family 'fp8' works here.*fp8-te.*no-such-engine-xyz.*fp8-torchao.*no-such-engine"
    ):
        registry.resolve_precision("fp8", "cpu", Capabilities())
    registry.refresh()


def test_a_member_named_exactly_is_never_replaced(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Te, "requires", ())
    registry.refresh()
    with pytest.raises(
        DrivetrainError, match=r"'fp8-te' can't be combined with backend 'single' on cpu: Transformer Eng"
    ):
        configured("fp8-te")
    assert state.current() is None
    monkeypatch.setattr(Fp8Te, "requires", ("no-such-engine-xyz>=2",))
    registry.refresh()
    with pytest.raises(EngineError, match=r"needs no-such-engine-xyz>=2, which is not installed; pip install 'no-such"):
        configured("fp8-te")
    registry.refresh()


# ------------------------------------------------------------------------------------- what Transformer Engine says


def test_another_device_is_refused_without_importing_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    reason = Fp8Te().refuses(Capabilities(), "cpu")
    assert reason == (
        "Transformer Engine computes on NVIDIA GPUs, and this run is on cpu; fp8-torchao runs on any device"
    )


def test_an_engine_that_cannot_be_imported_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    reason = Fp8Te().refuses(Capabilities(), "cuda")
    assert reason is not None
    assert "transformer_engine.pytorch can't be imported: ModuleNotFoundError" in reason
    assert "pip install --no-build-isolation 'drivetrain-fp8[te]'" in reason
    [check] = Fp8Te.checks()
    assert (check.name, check.ok) == ("transformer_engine", None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two modules that answer the engine's questions as on a Hopper GPU."""
    pytorch = types.ModuleType("transformer_engine.pytorch")
    answers = {
        "is_fp8_available": (True, ""),
        "is_fp8_block_scaling_available": (True, ""),
        "is_mxfp8_available": (False, "Device compute capability 10.0 or higher required"),
        "is_nvfp4_available": (False, "Device compute capability 10.0 or higher required"),
    }
    for name, answer in answers.items():
        setattr(pytorch, name, lambda return_reason=False, answer=answer: answer)
    package = types.ModuleType("transformer_engine")
    package.pytorch = pytorch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    return pytorch


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (None, None),
        ("DelayedScaling", None),
        ("Float8BlockScaling", None),
        ("MXFP8BlockScaling", "Transformer Engine says of MXFP8BlockScaling here: Device compute capability 10.0"),
        ("NVFP4BlockScaling", "Transformer Engine says of NVFP4BlockScaling here: Device compute capability 10.0"),
    ],
)
def test_the_engine_is_asked_for_the_recipe_that_is_wanted(engine: Any, recipe: Any, reason: str | None) -> None:
    found = Fp8Te(TeConfig(recipe=recipe)).refuses(Capabilities(), "cuda")
    assert found is None if reason is None else str(found).startswith(reason)


def test_the_doctor_has_a_row_for_each_recipe(engine: Any) -> None:
    rows = {check.name: check for check in Fp8Te.checks()}
    assert {name: row.ok for name, row in rows.items()} == {
        "transformer_engine": True,
        "DelayedScaling": True,
        "Float8CurrentScaling": True,
        "Float8BlockScaling": True,
        "MXFP8BlockScaling": None,
        "NVFP4BlockScaling": None,
    }
    assert "10.0" in rows["MXFP8BlockScaling"].detail


def test_an_engine_that_fails_to_answer_is_a_reason_too(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(return_reason: bool = False) -> None:
        raise RuntimeError("no CUDA GPUs are available")

    monkeypatch.setattr(engine, "is_fp8_available", fail)
    assert "RuntimeError: no CUDA GPUs are available" in str(Fp8Te().refuses(Capabilities(), "cuda"))


@torchao
def test_torchao_has_rows_that_need_no_device() -> None:
    rows = {check.name: check for check in Fp8Torchao.checks()}
    assert rows["torchao.float8"].ok
    assert all(row.ok is not False for row in rows.values())


@torchao
def test_a_torchao_that_cannot_be_imported_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert "torchao.float8 can't be imported: ModuleNotFoundError" in str(Fp8Torchao().refuses(Capabilities(), "cpu"))
    [check] = Fp8Torchao.checks()
    assert (check.name, check.ok) == ("torchao.float8", False)


# ----------------------------------------------------------------------------------------------- settings from code


def test_handlers_give_the_sections_what_was_said() -> None:
    assert AORecipeKwargs(recipe="rowwise", pad_inner_dim=False).settings() == {
        "fp8-torchao.recipe": "rowwise",
        "fp8-torchao.pad_inner_dim": False,
    }
    assert AORecipeKwargs(enable_fsdp_float8_all_gather=True).settings() == {"fp8-torchao.float8_all_gather": True}
    assert TERecipeKwargs(use_autocast_during_eval=True, amax_history_len=16, fp8_format="E4M3").settings() == {
        "fp8-te.in_evaluation": True,
        "fp8-te.recipe": "DelayedScaling",
        "fp8-te.options.amax_history_len": 16,
        "fp8-te.options.fp8_format": "E4M3",
    }
    assert TERecipeKwargs(use_mxfp8_block_scaling=True, margin=1).settings() == {
        "fp8-te.recipe": "MXFP8BlockScaling",
        "fp8-te.options.margin": 1,
    }
    assert FP8RecipeKwargs(backend="te", margin=2).settings() == TERecipeKwargs(margin=2).settings()


def test_an_empty_handler_says_which_engine_is_meant() -> None:
    assert AORecipeKwargs().settings() == FP8RecipeKwargs(backend="ao").settings() == {"fp8-torchao": {}}
    assert TERecipeKwargs().settings() == FP8RecipeKwargs().settings() == {"fp8-te": {}}


@torchao
def test_an_empty_handler_may_be_given_again_to_a_second_accelerator() -> None:
    first = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    second = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert first.run is second.run


@pytest.mark.parametrize(
    ("handler", "settings", "message"),
    [
        (AORecipeKwargs, {"recipe": "columnwise"}, "recipe"),
        (AORecipeKwargs, {"recipe": "rowwise", "enable_fsdp_float8_all_gather": True}, "needs recipe: tensorwise"),
        (AORecipeKwargs, {"config": "rowwise"}, "is a torchao.float8.Float8LinearConfig, given in code"),
        (AORecipeKwargs, {"config": object(), "recipe": "rowwise"}, "linear_config says it all, so recipe"),
        (AORecipeKwargs, {"module_filter_func": "head"}, "to leave layers out by name, use exclude"),
        (TERecipeKwargs, {"interval": 5}, "computes scales in every step"),
        (TERecipeKwargs, {"override_linear_precision": (False, False, True)}, "has no such setting any more"),
        (TERecipeKwargs, {"use_mxfp8_block_scaling": True, "amax_history_len": 4}, "contradicts amax_history_len"),
        (FP8RecipeKwargs, {"backend": "MSAMP"}, "backend='MSAMP' is none of: TE, AO"),
        (FP8RecipeKwargs, {"backend": "AO", "margin": 1}, "give torchao's as AORecipeKwargs"),
    ],
)
def test_handlers_refuse_what_cannot_be(handler: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        handler(**settings)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (TorchaoConfig, {"exclude": "a(b"}, "is no regular expression"),
        (TeConfig, {"modules": []}, "modules names no kind of layers"),
        (TeConfig, {"modules": ["Conv2d"]}, "Conv2d"),
        (TeConfig, {"recipe": "Delayed"}, "recipe"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)
