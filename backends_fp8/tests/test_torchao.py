"""torchao's float8 in one process on the CPU, for real: what is converted, how exact it is, and what is left after."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from backends_fp8.tests.recipes import LINEARS, adamw, batch, by_hand, distance, gradients, net, train
from drivetrain import Accelerator, AORecipeKwargs
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.plugin import Capabilities
from drivetrain_fp8 import TorchaoConfig
from drivetrain_fp8.float8_products import _quiet_import, emulated, gathers, missing_products, reason_against

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'drivetrain-fp8[torchao]'")

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "Float8Linear" in type(module).__name__]


# -------------------------------------------------------------------------------------------------------- how exact


def errors_of(accelerator: Accelerator) -> tuple[float, float]:
    """Of outputs and gradients, against plain torch in float32."""
    plain = net()
    model = accelerator.prepare(net())
    x, y = batch(0)
    right, found = plain(x), model(x)
    mse_loss(right, y).backward()
    accelerator.backward(mse_loss(found, y))
    return distance(found.detach(), right.detach()), distance(gradients(model), gradients(plain))


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_those_of_float32_to_eight_bits(configured: Any, recipe: str) -> None:
    forward, backward = errors_of(configured(section={"recipe": recipe}))
    assert 0.01 < forward < 0.06  # bfloat16 alone is off by 0.005
    assert 0.01 < backward < 0.12


def test_what_is_not_converted_is_exact_to_bfloat16(configured: Any) -> None:
    forward, backward = errors_of(configured(section={"exclude": ".*"}))
    assert 0 < forward < 0.008
    assert 0 < backward < 0.012


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_comes_as_far_as_in_float32(configured: Any, recipe: str) -> None:
    right, _ = by_hand(25)
    losses, *_ = train(25, accelerator=configured(section={"recipe": recipe}))
    assert right[-1] < 0.5 * right[0]
    assert sum(losses[-5:]) == pytest.approx(sum(right[-5:]), rel=0.1)


def test_layers_return_bfloat16_and_the_model_float32(configured: Any) -> None:
    accelerator = configured()
    model = net()
    seen: dict[str, torch.dtype] = {}
    model.blocks[0].inner.register_forward_hook(lambda _m, _i, out: seen.update(inner=out.dtype))
    model = accelerator.prepare(model)
    assert model(batch(0)[0]).dtype == torch.float32
    assert seen == {"inner": torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_COMPILE", "{backend: aot_eager}")
    compiled = errors_of(configured())
    assert 0.01 < compiled[0] < 0.06
    assert 0.01 < compiled[1] < 0.12


# ---------------------------------------------------------------------------------------------- what is converted


def test_every_linear_whose_shape_fits_is_converted(configured: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "drivetrain")
    model = nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 32), nn.Linear(32, 10))
    assert converted(configured().prepare(model)) == ["1"]
    assert "2 are left as they are: 2 whose in_features or out_features is no multiple of 16" in caplog.text


def test_a_model_in_which_nothing_is_converted_is_worth_a_warning(
    configured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    configured().prepare(nn.Linear(5, 3))
    [record] = [record for record in caplog.records if record.name == "drivetrain.fp8"]
    assert record.levelno == logging.WARNING
    assert "nothing in Linear is computed in float8" in record.message
    assert "no multiple of 16" in record.message


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, LINEARS),
        ({"exclude": ["head", "blocks.0"]}, ["first", "blocks.1.inner", "blocks.1.outer"]),
        ({"exclude": r".*\.outer|first"}, ["blocks.0.inner", "blocks.1.inner", "head"]),
        ({"keep_first_and_last": True}, LINEARS[1:-1]),
    ],
)
def test_layers_are_left_out_by_name_and_by_place(configured: Any, section: Any, expected: list[str]) -> None:
    assert converted(configured(section=section).prepare(net())) == expected


def test_a_filter_in_code_decides_layer_by_layer(configured: Any) -> None:
    handler = AORecipeKwargs(module_filter_func=lambda module, name: module.out_features > 32)
    accelerator = configured("fp8", kwargs_handlers=[handler])
    assert converted(accelerator.prepare(net())) == ["blocks.0.inner", "blocks.1.inner"]


def test_a_name_that_matches_nothing_is_an_error(configured: Any) -> None:
    with pytest.raises(ConfigError, match=r"fp8-torchao.exclude: 'haed' matches no module of Net.*first, blocks"):
        configured(section={"exclude": ["head", "haed"]}).prepare(net())


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_with_a_forward_of_their_own_are_left_alone(configured: Any) -> None:
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: 3 * x  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {
            "scaled": Scaled(16, 16),
            "patched": patched,
            "attention": nn.MultiheadAttention(16, 2),
            "mine": nn.Linear(16, 16),
        }
    )
    assert converted(configured().prepare(model)) == ["mine"]


def test_a_layer_used_twice_is_converted_once(configured: Any) -> None:
    shared = nn.Linear(16, 16)
    model = configured().prepare(nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared)))
    assert model[0] is model[2][0]
    assert converted(model) == ["0"]


def test_a_model_that_is_one_linear_is_converted(configured: Any) -> None:
    accelerator = configured()
    model = nn.Linear(16, 16)
    model, optimizer = accelerator.prepare(model, adamw(model))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(16, 16)).sum())
    optimizer.step()
    assert converted(nn.Sequential(model)) == ["0"]
    assert not torch.equal(model.weight, before)


def test_hooks_and_marks_of_the_user_stay_on_the_layer(configured: Any) -> None:
    model = net()
    calls: list[str] = []
    handle = model.head.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.head.decay = False  # type: ignore[assignment]
    model.head.eval()
    model = configured().prepare(model)
    model(batch(0)[0])
    assert (calls, model.head.decay, model.head.training) == (["pre"], False, False)
    handle.remove()
    model(batch(0)[0])
    assert calls == ["pre"]


class Language(nn.Module):
    """Its head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def test_tied_weights_stay_tied(configured: Any) -> None:
    model = configured().prepare(Language())
    assert model.head.weight is model.embedding.weight
    assert converted(model) == ["head"]


# --------------------------------------------------------------------------------------------------- what is left


def test_the_state_dict_is_that_of_plain_layers(configured: Any, tmp_path: Path) -> None:
    _, accelerator, model, _ = train(2, accelerator=configured())
    plain = net(1)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    accelerator.save_model(model, tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(plain.state_dict())
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())


def test_unwrapping_gives_the_users_layers_with_what_was_learnt(configured: Any) -> None:
    given = net()
    head = given.head
    accelerator = configured()
    model, optimizer = accelerator.prepare(given, adamw(given))
    train(2, accelerator=accelerator, objects=(model, optimizer))
    learnt = copy.deepcopy(dict(model.state_dict()))
    assert converted(accelerator.unwrap_model(model)) == LINEARS  # the default leaves the precision in place
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert converted(plain) == []
    assert plain.head is head
    right = net()
    right.load_state_dict(learnt)
    x, _ = batch(9)
    assert torch.equal(plain(x), right(x))
    assert pickle.loads(pickle.dumps(plain)).head.weight.shape == head.weight.shape


def test_a_deep_copy_computes_with_weights_of_its_own(configured: Any) -> None:
    model = configured().prepare(net())
    copied = copy.deepcopy(model)
    x, _ = batch(0)
    before = copied(x)
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(copied(x), before)
    assert converted(copied) == LINEARS


@pytest.mark.parametrize("then", ["fp8-torchao", "bf16"])
def test_a_checkpoint_loads_in_the_same_and_in_another_precision(configured: Any, tmp_path: Path, then: str) -> None:
    from drivetrain import state

    _, accelerator, model, optimizer = train(2, accelerator=configured())
    accelerator.save_state(tmp_path / "saved")
    expected, *_ = train(3, first=2, accelerator=accelerator, objects=(model, optimizer))
    state.reset()
    accelerator = configured(then)
    model = net(1)
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(tmp_path / "saved")
    losses, *_ = train(3, first=2, accelerator=accelerator, objects=(model, optimizer))
    assert losses == (expected if then == "fp8-torchao" else pytest.approx(expected, rel=0.1))


# --------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round_scales_to_power_of_too": True}, "did you mean 'round_scales_to_power_of_2'"),
        ({"nothing_like_it": 1}, "has no option 'nothing_like_it'. It has: cast_config_input"),
        ({"pad_inner_dim": True}, "write fp8-torchao.pad_inner_dim"),
        ({"enable_fsdp_float8_all_gather": True}, "write fp8-torchao.float8_all_gather"),
    ],
)
def test_options_are_checked_against_the_engine(configured: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(section={"options": options}).prepare(net())


def test_settings_reach_the_engine(configured: Any) -> None:
    section = {"recipe": "rowwise", "pad_inner_dim": False, "options": {"round_scales_to_power_of_2": False}}
    config: Any = configured(section=section).prepare(net()).head.config
    assert (config.emulate, config.pad_inner_dim, config.round_scales_to_power_of_2) == (True, False, False)
    assert config.cast_config_weight.scaling_granularity.name == "AXISWISE"


def test_the_engines_own_configuration_may_be_given_in_code(configured: Any) -> None:
    from torchao.float8 import Float8LinearConfig

    given = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    model: Any = configured("fp8", kwargs_handlers=[AORecipeKwargs(config=given)]).prepare(net())
    assert model.head.config.cast_config_weight == given.cast_config_weight
    assert model.head.config.emulate


def test_a_configuration_of_another_kind_is_refused(configured: Any) -> None:
    with pytest.raises(ConfigError, match="must be a torchao.float8.Float8LinearConfig, and is a object"):
        configured("fp8", kwargs_handlers=[AORecipeKwargs(config=object())]).prepare(net())


def test_an_odd_number_of_rows_is_filled_up(configured: Any) -> None:
    accelerator = configured(section={"emulate": False})
    if missing_products("cpu", rowwise=False) is not None:
        pytest.skip("this torch has no products of 8-bit matrices on the CPU")
    model = accelerator.prepare(net())
    accelerator.backward(model(batch(0, rows=5)[0]).sum())
    assert torch.isfinite(gradients(model)).all()


# ------------------------------------------------------------------------------------------------------ what can't be


def test_a_device_without_such_products_is_refused_by_its_own_word() -> None:
    reason = reason_against(TorchaoConfig(recipe="rowwise"), Capabilities(), "vulkan")
    assert reason is not None
    assert reason.startswith("it has no products of 8-bit matrices (")
    assert "recipe: tensorwise may work; fp8-torchao.emulate: true" in reason
    assert reason_against(TorchaoConfig(emulate=True), Capabilities(), "vulkan") is None


def test_a_device_that_fails_without_a_word_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    assert missing_products("cpu", rowwise=False) == "NotImplementedError"


def test_products_are_emulated_on_the_cpu_or_where_that_is_asked() -> None:
    assert [emulated(TorchaoConfig(emulate=value), "cpu") for value in (None, True, False)] == [True, True, False]
    assert [emulated(TorchaoConfig(emulate=value), "cuda") for value in (None, True, False)] == [False, True, False]


def test_gathering_in_eight_bits_is_refused_where_the_backend_cannot(configured: Any) -> None:
    with pytest.raises(
        DrivetrainError, match=r"'fp8-torchao' can't be combined with backend 'single' on cpu.*leave it"
    ):
        configured(section={"float8_all_gather": True})


def test_gathering_in_eight_bits_is_on_where_it_can_be() -> None:
    able = Capabilities(features=frozenset({"all_gather_extensions"}))
    assert [gathers(TorchaoConfig(float8_all_gather=value), able) for value in (None, True, False)] == [
        True,
        True,
        False,
    ]
    assert not gathers(TorchaoConfig(), Capabilities())
    assert not gathers(TorchaoConfig(recipe="rowwise"), able)


def test_the_import_leaves_out_what_is_no_news_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    engine, torch_log = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    torch_log.addHandler(caplog.handler)  # torch's loggers hand nothing on
    try:
        with _quiet_import():
            engine.warning("Failed to load _C_mxfp8.so: %s", "no such library")
            torch_log.warning("<enum 'KernelPreference'> is an Enum subclass and is now natively supported")
            engine.warning("Skipping import of cpp extensions due to incompatible torch version.")
            torch_log.warning("<enum 'Color'> is an Enum subclass and is now natively supported")
        engine.warning("Failed to load again")
    finally:
        torch_log.removeHandler(caplog.handler)
    assert [message.split()[0] for message in dict.fromkeys(caplog.messages)] == ["Skipping", "<enum", "Failed"]
    assert caplog.messages[1].startswith("<enum 'Color'>")
