"""What the Accelerator is given, and the state of the process that it starts."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain
from core.tests.scalar import numbers
from drivetrain import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
    PartialState,
    ProfileKwargs,
    ProjectConfiguration,
    registry,
    state,
)
from drivetrain.elsewhere import ATTRIBUTES, KEYWORDS
from drivetrain.errors import ConfigError, DrivetrainError, PluginNotFoundError, StateConflictError
from drivetrain.handlers import TorchDynamoPlugin

pytestmark = pytest.mark.usefixtures("fresh_run")


def test_a_second_accelerator_shares_the_run_and_keeps_its_own_count() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4)
    second = Accelerator()
    assert second.run is first.run
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)
    assert GradientState().num_steps == 1


def test_gradient_state_looks_at_the_accelerator_whose_loader_is_iterated() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = first.prepare(numbers(2))
    second = Accelerator(gradient_accumulation_steps=2)
    assert GradientState().num_steps == 2
    assert [GradientState().num_steps for _ in loader] == [4, 4]
    del second
    gc.collect()
    assert GradientState().initialized
    assert GradientState().num_steps == 4


@pytest.mark.parametrize("steps", [0, -1, 1.5, "two"])
def test_a_second_accelerator_is_told_what_is_wrong_with_its_own_count(steps: Any) -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"Accelerator\(\.\.\.\): gradient_accumulation_steps: "):
        Accelerator(gradient_accumulation_steps=steps)


def test_a_second_accelerator_may_name_the_file_of_the_first_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: bf16\n")
    first = Accelerator(cpu=True, config_file=file)
    assert Accelerator(config_file=tmp_path / "." / "run.yaml").run is first.run
    with pytest.raises(StateConflictError, match=r"runs with the settings of .*run\.yaml, so those of .*other\.yaml"):
        Accelerator(config_file=tmp_path / "other.yaml")
    state.reset()
    Accelerator(cpu=True, mixed_precision="no", config_file=None)
    with pytest.raises(StateConflictError, match=r"runs with no config file"):
        Accelerator(config_file=file)


def test_a_setting_that_does_not_exist_is_no_conflict() -> None:
    PartialState(cpu=True)
    with pytest.raises(ConfigError, match="mixed_precisoin: unknown key; did you mean 'mixed_precision'"):
        PartialState(mixed_precisoin="bf16")


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler"])
def test_settings_of_loaders_are_taken_where_older_scripts_pass_them(name: str) -> None:
    configuration = DataLoaderConfiguration(data_seed=3)
    for value in (True, False):
        accelerator = Accelerator(cpu=True, dataloader_config=configuration, **{name: value})
        assert getattr(accelerator.dataloader_config, name) is value
        assert accelerator.dataloader_config.data_seed == 3
    assert Accelerator(dataloader_config=configuration, **{name: None}).dataloader_config == configuration
    assert configuration == DataLoaderConfiguration(data_seed=3)
    with pytest.raises(TypeError, match=name):
        Accelerator(**{name: "yes"})


@pytest.mark.parametrize(
    ("keyword", "wanted"),
    [
        ("dataloader_config", "DataLoaderConfiguration"),
        ("gradient_accumulation_plugin", "GradientAccumulationPlugin"),
        ("project_config", "ProjectConfiguration"),
    ],
)
def test_settings_of_another_type_are_named(keyword: str, wanted: str) -> None:
    with pytest.raises(TypeError, match=f"{keyword} takes a {wanted}; got dict"):
        Accelerator(cpu=True, **{keyword: {"num_steps": 2}})


def test_a_conflicting_second_accelerator_names_both_values() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(StateConflictError, match=r"bf16.*fp16"):
        Accelerator(mixed_precision="fp16")


def test_who_only_looked_at_the_world_has_not_decided_how_to_compute() -> None:
    early = PartialState(cpu=True)
    assert AcceleratorState().mixed_precision == "no"
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.run.policy.compute == "bfloat16"
    assert AcceleratorState().mixed_precision == "bf16"
    assert (early.device.type, accelerator.device.type) == ("cpu", "cpu")
    with pytest.raises(StateConflictError, match=r"bf16.*fp16"):
        Accelerator(mixed_precision="fp16")


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}, r"mixed_precision='bf16'.*'fp16' now"),
        ({"device": "cpu"}, {"device": "torch"}, r"device='cpu'.*'torch' now"),
        ({"device": "cpu"}, {"config_file": "later.yaml"}, "runs with no config file"),
    ],
)
def test_what_a_state_was_asked_for_and_where_it_runs_stands(
    first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    PartialState(**first)
    with pytest.raises(StateConflictError, match=message):
        Accelerator(**then)
    assert PartialState().num_processes == 1


def test_a_setting_that_can_not_be_leaves_the_run_of_a_state_as_it_is() -> None:
    early = PartialState(cpu=True)
    with pytest.raises(PluginNotFoundError, match="no precision 'bf61'"):
        Accelerator(mixed_precision="bf61")
    assert AcceleratorState().mixed_precision == "no"
    Accelerator(mixed_precision="bf16")
    assert early.initialized


def test_a_state_still_says_who_it_was_after_the_run_was_taken_down(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    kept = weakref.ref(accelerator.run.hooks)
    accelerator.end_training()
    accelerator.print("done")
    assert capsys.readouterr().out == "done\n"
    assert accelerator.is_last_process
    assert accelerator.on_main_process(lambda: "ran")() == "ran"
    assert accelerator.state.mixed_precision == "bf16"
    assert not accelerator.state.initialized
    assert "process_index=0" in repr(accelerator.state)
    with pytest.raises(DrivetrainError, match="the run was taken down"):
        accelerator.wait_for_everyone()
    del accelerator
    gc.collect()
    assert kept() is None, "a run that ended must not keep plugins, and models in them, alive"


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_an_attribute_that_is_not_here_says_what_to_use(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    for owner in (accelerator, accelerator.state, accelerator.gradient_state):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; use instead: "):
            getattr(owner, name)


def test_any_other_missing_attribute_is_an_ordinary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Accelerator):
        @property
        def broken(self) -> Any:
            return self.state.no_such_thing

    accelerator = Failing(cpu=True)
    with pytest.raises(AttributeError, match=r"'Failing' object has no attribute 'no_such_method'$"):
        accelerator.no_such_method()
    with pytest.raises(AttributeError, match=r"'AcceleratorState' object has no attribute 'no_such_thing'$"):
        accelerator.broken
    monkeypatch.setattr(registry, "keywords", lambda: {"some_plugin": ()})
    with pytest.raises(AttributeError, match="'some_plugin'; use instead: accelerator.run.names"):
        accelerator.state.some_plugin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "bf61"}, r"^Accelerator\(\.\.\.\): no precision 'bf61'; did you mean 'bf16'\?"),
        ({"backend": "snigle"}, "no backend 'snigle'; did you mean 'single'"),
        ({"device": "torch", "mixed_precision": "bf61"}, "no precision 'bf61'"),
    ],
)
def test_an_unknown_name_is_told_before_a_conflict(arguments: dict[str, Any], message: str) -> None:
    Accelerator(cpu=True)
    with pytest.raises(PluginNotFoundError, match=message):
        Accelerator(**arguments)


def test_all_unknown_names_of_a_second_accelerator_are_told_at_once() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*no backend 'snigle'.*no precision 'bf61'"):
        Accelerator(backend="snigle", mixed_precision="bf61")


@pytest.mark.parametrize("steps", [0, -1, 2.0, "2", True])
def test_a_first_accelerator_is_told_what_is_wrong_with_its_count_too(steps: Any) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: "):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)
    assert state.current() is None


def test_where_the_device_is_a_cpu_the_cpu_may_be_asked_for_later() -> None:
    accelerator = Accelerator(device="torch")
    if accelerator.device.type != "cpu":
        pytest.skip("this machine has an accelerator")
    assert Accelerator(cpu=True).run is accelerator.run
    assert PartialState(cpu=True).device == accelerator.device


def test_one_handler_without_a_list_is_told_so() -> None:
    with pytest.raises(TypeError, match=r"kwargs_handlers takes a list of KwargsHandler objects; got AutocastKwargs"):
        Accelerator(cpu=True, kwargs_handlers=AutocastKwargs())  # type: ignore[arg-type]


def test_a_plugin_that_is_not_asked_for_may_be_one_that_is_not_here() -> None:
    Accelerator(
        cpu=True, some_engine_plugin=None, some_engine_plugins=None, parallelism_config=None, dynamo_plugin=None
    )
    with pytest.raises(TypeError, match="'some_engine_plugin', which no installed plugin claims"):
        Accelerator(some_engine_plugin=object())
    with pytest.raises(TypeError, match="'mixed_precison'.*did you mean 'mixed_precision'"):
        Accelerator(mixed_precison=None)


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_a_keyword_that_is_not_here_says_what_to_use(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}', which no installed plugin claims; use instead: "):
        Accelerator(cpu=True, **{name: "something"})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (AutocastKwargs(False), AutocastKwargs(enabled=False)),
        (
            GradScalerKwargs(64.0, 2.0, 0.5, 10),
            GradScalerKwargs(init_scale=64.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=10),
        ),
        (ProfileKwargs(["cpu"], None, None, True), ProfileKwargs(activities=["cpu"], record_shapes=True)),
        (
            GradientAccumulationPlugin(2, True, False),
            GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False),
        ),
        (DataLoaderConfiguration(True, None, False), DataLoaderConfiguration(split_batches=True, even_batches=False)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_may_be_given_by_position_in_the_order_scripts_know(given: Any, named: Any) -> None:
    assert given == named


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoaderConfiguration(split_batches="yes"), "split_batches must be True or False; got 'yes'"),
        (lambda: DataLoaderConfiguration(data_seed=True), "data_seed must be a whole number or None; got True"),
        (lambda: DataLoaderConfiguration(dispatch_batches=1), "dispatch_batches must be True or False or None; got 1"),
        (lambda: GradientAccumulationPlugin(num_steps="2"), "num_steps must be a whole number or None; got '2'"),
        (lambda: GradientAccumulationPlugin(0), "num_steps must be at least 1; got 0"),
        (lambda: GradientAccumulationPlugin(short_group="x"), "short_group must be 'mean' or 'fixed'; got 'x'"),
        (lambda: ProjectConfiguration(total_limit=0), "total_limit must be at least 1; got 0"),
        (lambda: ProjectConfiguration(iteration="1"), "iteration must be a whole number; got '1'"),
    ],
)
def test_errors_of_settings_are_one_line_to_read(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert str(caught.value) == message


def test_nothing_is_written_to_the_environment() -> None:
    before = dict(os.environ)
    Accelerator(cpu=True, mixed_precision="bf16")
    state.reset()
    assert Accelerator().mixed_precision == "no"
    assert dict(os.environ) == before


def test_an_unclaimed_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="magic_plugin"):
        Accelerator(cpu=True, magic_plugin=1)


def test_partial_state_answers_without_an_accelerator() -> None:
    one = PartialState(cpu=True)
    assert (one.num_processes, one.process_index, one.is_main_process, one.device.type) == (1, 0, True, "cpu")
    assert one.on_main_process(lambda: 3)() == 3
    assert one.on_process(lambda: 3, process_index=1)() is None
    for decorator in (one.on_process, one.on_local_process):
        with pytest.raises(TypeError, match="needs to know which process"):
            decorator(lambda: 3)


def test_gradient_state_follows_the_loader() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(numbers(3))
    view = GradientState()
    ends = [(view.end_of_dataloader, view.sync_gradients, view.in_dataloader) for _ in loader]
    assert ends == [(False, False, True), (False, True, True), (True, True, True)]
    assert not view.in_dataloader


def test_public_names_are_all_there() -> None:
    for name in drivetrain.__all__:
        assert getattr(drivetrain, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        drivetrain.no_such_name


def test_deepcopy_of_an_accelerator_is_itself() -> None:
    accelerator = Accelerator(cpu=True)
    assert copy.deepcopy(accelerator) is accelerator


def test_non_blocking_copies_are_asked_for_where_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    to = torch.Tensor.to

    def watched(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        asked.append(options.get("non_blocking") is True)
        return to(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    for wanted in (True, False):
        state.reset()
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=wanted))
        loader = accelerator.prepare(numbers(1))
        asked.clear()
        next(iter(loader))
        assert asked == [wanted]


# ---------------------------------------------------------------------------------------------------------- compiling


def compiled_with(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[dict[str, Any]]:
    """What ``torch.compile``'s in-place form was called with while a model was prepared."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: calls.append(options))
    Accelerator(cpu=True, **arguments).prepare(nn.Linear(1, 1))
    return calls


def test_a_compiler_is_chosen_by_its_name_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    (options,) = compiled_with(monkeypatch, dynamo_backend="AOT_EAGER")
    assert options["backend"] == "aot_eager"


def test_a_compiling_plugin_says_how_models_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = TorchDynamoPlugin(backend="eager", mode="default", dynamic=True)
    (options,) = compiled_with(monkeypatch, dynamo_plugin=plugin)
    assert options == {"backend": "eager", "mode": "default", "dynamic": True, "fullgraph": False}
    state.reset()
    assert compiled_with(monkeypatch, kwargs_handlers=[TorchDynamoPlugin(backend="eager")])[0]["backend"] == "eager"


@pytest.mark.parametrize(
    "given", [{"dynamo_plugin": TorchDynamoPlugin(disable=True)}, {"dynamo_backend": "no"}], ids=["disable", "no"]
)
def test_compilation_that_is_configured_can_be_switched_off_in_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("compile: {backend: eager}\n")
    assert len(compiled_with(monkeypatch, config_file=file)) == 1
    state.reset()
    assert compiled_with(monkeypatch, config_file=file, **given) == []


def test_a_compiling_plugin_that_says_nothing_leaves_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert compiled_with(monkeypatch, dynamo_plugin=TorchDynamoPlugin()) == []
    state.reset()
    file = tmp_path / "c.yaml"
    file.write_text("compile: {backend: eager, fullgraph: true}\n")
    (options,) = compiled_with(monkeypatch, config_file=file, dynamo_plugin=TorchDynamoPlugin(mode="default"))
    assert options == {"backend": "eager", "fullgraph": True, "mode": "default"}


def test_a_compiler_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="two TorchDynamoPlugin; give one"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager"))


def test_compiling_by_regions_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call block.compile\(\) for each repeated block"):
        TorchDynamoPlugin(use_regional_compilation=True)


def test_a_misspelt_keyword_is_told_the_one_that_is_meant() -> None:
    with pytest.raises(TypeError, match=r"'mixed_precison'.*; did you mean 'mixed_precision'\?"):
        Accelerator(mixed_precison="bf16")
