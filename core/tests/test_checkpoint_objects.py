"""What is saved of models, optimizers, schedulers and registered objects, and whether it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from core.tests.checkpoints import filled, simple, value
from drivetrain import Accelerator
from drivetrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")


# ------------------------------------------------------------------------------------------- models and optimizers


class Tied(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        nn.init.constant_(self.embed.weight, fill)
        self.head.weight = self.embed.weight


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    simple(Tied(7.0)).save_state(tmp_path / "c")
    fresh = Tied(0.0)
    simple(fresh).load_state(tmp_path / "c")
    assert fresh.embed.weight is fresh.head.weight
    assert float(fresh.embed.weight.detach().mean()) == 7.0
    assert (tmp_path / "c/models/0/model.safetensors").stat().st_size < 2 * 4 * 12 + 200


def test_models_of_one_class_and_an_average_of_one_are_told_apart(tmp_path: Path) -> None:
    models = [filled(1.0), filled(2.0)]
    accelerator = simple(*models)
    accelerator.register_for_checkpointing(filled(3.0))
    accelerator.save_state(tmp_path / "c")
    fresh, average = [filled(0.0), filled(0.0)], filled(0.0)
    accelerator = simple(*fresh)
    accelerator.register_for_checkpointing(average)
    accelerator.load_state(tmp_path / "c")
    assert [value(model) for model in [*fresh, average]] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("compiled_first", [True, False], ids=["compiled then plain", "plain then compiled"])
def test_a_compiled_part_leaves_no_trace_in_the_names(tmp_path: Path, compiled_first: bool) -> None:
    def make(fill: float, compiled: bool) -> nn.Sequential:
        model = nn.Sequential(filled(fill), nn.ReLU(), filled(fill))
        if compiled:
            model[0] = torch.compile(model[0], backend="eager")
        return model

    adam = lambda parameters: torch.optim.Adam(parameters)  # noqa: E731
    model = make(5.0, compiled_first)
    accelerator = simple(model, optimizer=adam)
    model(torch.ones(1, 2)).sum().backward()
    accelerator.known.optimizers[0].step()
    saved = value(model)
    assert saved != 5.0
    accelerator.save_state(tmp_path / "c")
    assert accelerator.get_state_dict(model).keys() == make(0.0, False).state_dict().keys()
    fresh = make(0.0, not compiled_first)
    accelerator = simple(fresh, optimizer=adam)
    accelerator.load_state(tmp_path / "c")
    assert value(fresh) == saved
    assert len(accelerator.known.optimizers[0].state) == 4


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "history": torch.arange(3)}

    def set_extra_state(self, extra: Any) -> None:
        self.seen = extra["seen"]


def test_extra_state_of_a_module_comes_back(tmp_path: Path) -> None:
    model, fresh = WithExtraState(), WithExtraState()
    model.seen = (1, "two")
    simple(model).save_state(tmp_path / "c")
    simple(fresh).load_state(tmp_path / "c")
    assert fresh.seen == (1, "two")


OPTIMIZERS = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "SGD", "LBFGS"])
def test_every_optimizer_of_torch_goes_on(tmp_path: Path, name: str) -> None:
    def make() -> tuple[Accelerator, nn.Module, Any]:
        model = filled(0.5, 3, 2)
        options = {"momentum": 0.9} if name == "SGD" else {}
        accelerator = simple(model, optimizer=lambda ps: getattr(torch.optim, name)(ps, lr=0.01, **options))
        return accelerator, model, accelerator.known.optimizers[0]

    def train(model: nn.Module, optimizer: Any, steps: int) -> list[Any]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(6.0).reshape(2, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            closure()
            optimizer.step(closure)
        return model.weight.tolist()  # type: ignore[operator, union-attr, return-value]

    accelerator, model, optimizer = make()
    train(model, optimizer, 3)
    accelerator.save_state(tmp_path / "c")
    whole = train(model, optimizer, 3)
    accelerator, model, optimizer = make()
    accelerator.load_state(tmp_path / "c")
    assert train(model, optimizer, 3) == whole


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_goes_on(tmp_path: Path, name: str) -> None:
    def make() -> tuple[Accelerator, Any, Any]:
        model = filled(1.0)
        accelerator = simple(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return accelerator, *accelerator.prepare(optimizer, SCHEDULERS[name](optimizer))

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            optimizer.step()
            scheduler.step(*([float(step)] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    accelerator, optimizer, scheduler = make()
    rates(optimizer, scheduler, 3)
    accelerator.save_state(tmp_path / "c")
    whole = rates(optimizer, scheduler, 5)
    accelerator, optimizer, scheduler = make()
    accelerator.load_state(tmp_path / "c")
    assert rates(optimizer, scheduler, 5) == whole


def test_optimizer_state_follows_names_not_positions(tmp_path: Path) -> None:
    def make(order: list[str], fill: float) -> tuple[Accelerator, nn.Linear]:
        model = filled(fill)
        accelerator = simple(model)
        parameters = dict(model.named_parameters())
        accelerator.prepare(torch.optim.Adam([parameters[name] for name in order]))
        return accelerator, model

    accelerator, model = make(["weight", "bias"], 1.0)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 2.0), torch.full((2,), 3.0)
    accelerator.known.optimizers[0].step()
    accelerator.save_state(tmp_path / "c")
    accelerator, fresh = make(["bias", "weight"], 0.0)
    accelerator.load_state(tmp_path / "c")
    moments = accelerator.known.optimizers[0].state
    assert torch.allclose(moments[fresh.weight]["exp_avg"], torch.full((2, 2), 0.2))
    assert torch.allclose(moments[fresh.bias]["exp_avg"], torch.full((2,), 0.3))


# --------------------------------------------------------------------------------------------------- registered objects


class Meter:
    def __init__(self, total: Any = 0) -> None:
        self.total = total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


class Other(Meter):
    pass


def test_registering_what_has_no_state_names_the_offenders() -> None:
    accelerator = simple()
    with pytest.raises(ValueError, match=r"unlike: int \(argument 1\), object \(argument 2\)"):
        accelerator.register_for_checkpointing(Meter(), 3, object())
    assert accelerator.registered == []


def test_an_object_registered_twice_is_saved_once(tmp_path: Path) -> None:
    accelerator, meter = simple(), Meter(5)
    accelerator.register_for_checkpointing(meter, meter)
    accelerator.save_state(tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c/custom").iterdir()) == ["0.json"]


def test_a_stray_file_does_no_harm_and_a_missing_object_is_named(tmp_path: Path) -> None:
    model = filled(1.0)
    accelerator = simple(model)
    accelerator.register_for_checkpointing(Meter(5))
    accelerator.save_state(tmp_path / "c")
    (tmp_path / "c/custom/0.json.bak").write_text("a copy")
    fresh, meters = filled(0.0), [Meter(), Meter()]
    accelerator = simple(fresh)
    accelerator.register_for_checkpointing(*meters)
    with pytest.raises(CheckpointError, match=r"this run has 2 \(Meter, Meter\) object\(s\) .* checkpoint 1 \(Meter\)"):
        accelerator.load_state(tmp_path / "c")
    assert value(fresh) == 0.0
    assert [meter.total for meter in meters] == [0, 0]
    accelerator.load_state(tmp_path / "c", strict=False)
    assert value(fresh) == 1.0
    assert [meter.total for meter in meters] == [5, 0]


def test_objects_registered_in_another_order_are_not_mixed_up(tmp_path: Path) -> None:
    accelerator = simple()
    accelerator.register_for_checkpointing(Meter(1), Other(2))
    accelerator.save_state(tmp_path / "c")
    accelerator = simple()
    accelerator.register_for_checkpointing(Other(), Meter())
    with pytest.raises(CheckpointError, match="registered object 0 is a Other, but a Meter was saved"):
        accelerator.load_state(tmp_path / "c")


def test_state_that_can_not_be_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    accelerator = simple()
    accelerator.register_for_checkpointing(Meter({"best": [Meter()]}))
    with pytest.raises(CheckpointError, match=r"registered object 0 \(Meter\)\['total'\]\['best'\]\[0\]"):
        accelerator.save_state(tmp_path / "c")
    assert not any(tmp_path.iterdir())


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Picky(Meter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("version")

    accelerator = simple()
    accelerator.register_for_checkpointing(Picky())
    accelerator.save_state(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"registered object 0 \(Picky\) does not accept.*'version'"):
        accelerator.load_state(tmp_path / "c")


# -------------------------------------------------------------------------------------------------------------- hooks


def test_hooks_may_save_and_load_models_themselves(tmp_path: Path) -> None:
    accelerator = simple(filled(1.0), filled(2.0), optimizer=torch.optim.Adam)

    def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        assert [value(model) for model in models] == [1.0, 2.0]
        torch.save(weights.pop(), Path(output_dir) / "second.pt")

    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "c")
    assert (tmp_path / "c/models/0").exists()
    assert not (tmp_path / "c/models/1").exists()
    assert "second.pt" in json.loads((tmp_path / "c/manifest.json").read_text())["files"]

    fresh = [filled(0.0), filled(0.0)]
    accelerator = simple(*fresh, optimizer=torch.optim.Adam)
    with pytest.raises(CheckpointError, match=r"model 1 \(Linear\) were taken over by a save_state pre-hook"):
        accelerator.load_state(tmp_path / "c")
    assert value(fresh[0]) == 0.0

    def load(models: list[nn.Module], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir) / "second.pt"))

    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(tmp_path / "c")
    assert [value(model) for model in fresh] == [1.0, 2.0]


def test_a_removed_hook_is_not_called(tmp_path: Path) -> None:
    accelerator, calls = simple(filled(1.0)), []
    accelerator.register_save_state_pre_hook(lambda *arguments: calls.append("save")).remove()
    accelerator.register_load_state_pre_hook(lambda *arguments: calls.append("load")).remove()
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert calls == []


def test_a_hook_that_fails_leaves_nothing(tmp_path: Path) -> None:
    accelerator = simple(filled(1.0))

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        (Path(output_dir) / "half").write_text("")
        raise RuntimeError("no network")

    accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(CheckpointError, match="a save_state pre-hook failed: RuntimeError: no network"):
        accelerator.save_state(tmp_path / "c")
    assert not any(tmp_path.iterdir())
