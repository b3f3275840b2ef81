"""The precision ``fp8-te`` with a STAND-IN for Transformer Engine (te_stand_in.py): conversion, contexts and state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends_fp8.tests import te_stand_in
from backends_fp8.tests.recipes import LINEARS, adamw, batch, distance, full, net, settings, train
from drivetrain import Accelerator, state
from drivetrain.errors import CheckpointError

DELAYED = {"recipe": "DelayedScaling", "options": {"amax_history_len": 4}}


@pytest.fixture
def engine() -> Iterator[None]:
    with te_stand_in.installed():
        yield
        state.reset()


pytestmark = pytest.mark.usefixtures("engine")


def kinds(model: nn.Module) -> dict[str, str]:
    """Names of the engine's layers, by kind."""
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, (te_stand_in.Linear, te_stand_in.LayerNorm))
    }


# ------------------------------------------------------------------------------------------------------- conversion


def test_linear_and_layer_norm_become_the_engines_with_the_same_parameters(configured: Any) -> None:
    given = net()
    before = dict(given.named_parameters())
    model = configured("fp8-te").prepare(given)
    assert kinds(model) == {name: "Linear" for name in LINEARS} | {f"blocks.{i}.norm": "LayerNorm" for i in (0, 1)}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(net().state_dict())  # without the engine's pickle


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"modules": ["Linear"]}, LINEARS),
        ({"modules": ["LayerNorm"]}, ["blocks.0.norm", "blocks.1.norm"]),
        ({"modules": ["Linear"], "keep_first_and_last": True}, LINEARS[1:-1]),
        ({"exclude": ["blocks", "head"]}, ["first"]),
        ({"recipe": "MXFP8BlockScaling", "modules": ["Linear"]}, LINEARS[1:-1]),  # 16 is no multiple of 32
        ({"recipe": "Float8BlockScaling", "modules": ["Linear"]}, []),  # nor anything of 128
    ],
)
def test_layers_are_chosen_by_kind_place_name_and_shape(configured: Any, section: Any, expected: list[str]) -> None:
    assert list(kinds(configured("fp8-te", section).prepare(net()))) == expected


def test_a_norm_without_weights_is_left_alone(configured: Any) -> None:
    model = nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm(16, bias=False), nn.LayerNorm(16))
    assert list(kinds(configured("fp8-te").prepare(model))) == ["2"]


def test_unwrapping_gives_the_users_layers_with_the_same_values(configured: Any) -> None:
    given = net()
    norm = given.blocks[0].norm
    accelerator = configured("fp8-te", DELAYED)
    model, optimizer = accelerator.prepare(given, adamw(given))
    train(2, accelerator=accelerator, objects=(model, optimizer))
    learnt = copy.deepcopy(model.state_dict())
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    right = net(1)
    right.load_state_dict(learnt)
    x, _ = batch(0)
    assert kinds(plain) == {}
    assert plain.blocks[0].norm is norm
    assert torch.equal(plain(x), right(x))


# --------------------------------------------------------------------------------------------------------- contexts


def test_forward_runs_in_the_engines_context_inside_of_bfloat16(configured: Any) -> None:
    accelerator = configured("fp8-te", DELAYED)
    model = accelerator.prepare(net())
    found = model(batch(0)[0])
    [context] = te_stand_in.CONTEXTS
    assert (context["enabled"], context["autocast"], context["group"]) == (True, True, None)
    assert type(context["recipe"]).__name__ == "DelayedScaling"
    assert context["recipe"].amax_history_len == 4
    assert found.dtype == torch.float32
    with accelerator.autocast():
        pass
    assert te_stand_in.CONTEXTS[-1]["recipe"] is context["recipe"]


@pytest.mark.parametrize("section", [DELAYED, {**DELAYED, "in_evaluation": True}])
def test_evaluation_is_in_eight_bits_only_where_that_is_chosen(configured: Any, section: dict[str, Any]) -> None:
    model = configured("fp8-te", section).prepare(net())
    x, _ = batch(0)
    for training in (True, False):
        model.train(training)(x)
    assert [context["enabled"] for context in te_stand_in.CONTEXTS] == [True, section.get("in_evaluation", False)]


def test_the_recipe_is_the_engines_choice_where_none_is_named(configured: Any) -> None:
    configured("fp8-te").prepare(net())(batch(0)[0])
    assert te_stand_in.CONTEXTS[0]["recipe"].amax_history_len == 1024


# ------------------------------------------------------------------------------------------------------------ state


def scales(model: nn.Module) -> list[float]:
    return [float(m.fp8_meta["scaling_fwd"].scale[0]) for m in model.modules() if isinstance(m, te_stand_in.Linear)]


def resumed(configured: Any, folder: Path, section: Any) -> tuple[Accelerator, Any, list[float]]:
    """Train, save, go on; then make everything anew."""
    _, accelerator, model, optimizer = train(3, accelerator=configured("fp8-te", section))
    accelerator.save_state(folder)
    expected, *_ = train(3, first=3, accelerator=accelerator, objects=(model, optimizer))
    state.reset()
    return accelerator, model, expected


def test_scales_are_saved_and_training_goes_on_the_same(configured: Any, tmp_path: Path) -> None:
    *_, expected = resumed(configured, tmp_path / "saved", DELAYED)
    accelerator = configured("fp8-te", DELAYED)
    model = net(1)
    objects = accelerator.prepare(model, adamw(model))
    accelerator.load_state(tmp_path / "saved")
    assert all(scale != 1 for scale in scales(objects[0]))
    losses, *_ = train(3, first=3, accelerator=accelerator, objects=objects)
    assert losses == expected
    assert b"pickle" not in b"".join(path.read_bytes() for path in (tmp_path / "saved").rglob("*.json"))


def test_weights_without_scales_load_with_a_word_about_it(
    configured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, accelerator, _, _ = train(2, accelerator=configured("bf16"))
    accelerator.save_state(tmp_path / "saved")
    state.reset()
    model = net(1)
    accelerator = configured("fp8-te", DELAYED)
    accelerator.prepare(model, adamw(model))
    accelerator.load_state(tmp_path / "saved")
    assert "no scales for 6 layers (first, ...), which start to learn them anew" in caplog.text


def test_scales_of_another_precision_are_left_out_with_a_word(
    configured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(configured, tmp_path / "saved", DELAYED)
    model = net(1)
    accelerator = configured("bf16")
    accelerator.prepare(model, adamw(model))
    accelerator.load_state(tmp_path / "saved")
    assert "saved with mixed_precision 'fp8-te', whose own state this run ('bf16') leaves out" in caplog.text


def test_a_history_of_another_length_is_refused(configured: Any, tmp_path: Path) -> None:
    resumed(configured, tmp_path / "saved", DELAYED)
    accelerator = configured("fp8-te", {"recipe": "DelayedScaling", "options": {"amax_history_len": 8}})
    model = net(1)
    accelerator.prepare(model, adamw(model))
    with pytest.raises(CheckpointError, match=r"learnt over 4 steps.*set fp8-te.options.amax_history_len: 4"):
        accelerator.load_state(tmp_path / "saved")


def test_other_recipes_have_nothing_to_save(configured: Any, tmp_path: Path) -> None:
    _, accelerator, _, _ = train(2, accelerator=configured("fp8-te", {"recipe": "Float8CurrentScaling"}))
    accelerator.save_state(tmp_path / "saved")
    assert not (tmp_path / "saved" / "precision").exists()


# ------------------------------------------------------------------------------------------------------------ ranks


def on_ranks(steps: int) -> Any:
    """Losses, scales, full weights, and what the contexts had, with the stand-in in each rank."""
    with te_stand_in.installed():
        losses, accelerator, model, _ = train(steps)
        weights = full(accelerator, model)
        contexts = {(context["enabled"], context["autocast"]) for context in te_stand_in.CONTEXTS}
        found = scales(model)
        state.reset()
    return losses, found, {name: value.tolist() for name, value in weights.items()}, contexts


@pytest.mark.parametrize(
    ("backend", "section", "autocast"),
    [
        ("ddp", {}, True),
        ("fsdp", {"transformer_classes": "Block"}, True),
        ("fsdp", {"mixed_precision_policy": {"param_dtype": "bfloat16"}}, False),  # the backend casts by itself
    ],
)
def test_ranks_share_their_largest_values(ranks: Any, backend: str, section: Any, autocast: bool) -> None:
    pytest.importorskip(f"drivetrain_{backend}")
    config = settings("fp8-te", backend, fp8_te=DELAYED, **{backend: section})
    found = ranks(2).run(on_ranks, 4, config=config, timeout=60)
    assert found[0][1] == found[1][1]
    assert all(scale != 1 for scale in found[0][1])
    assert found[0][3] == {(True, autocast)}
    weights = {name: torch.tensor(value) for name, value in found[0][2].items()}
    assert list(weights) == list(net().state_dict())
    assert distance(weights["head.weight"], net().head.weight.detach()) > 0.01
