"""Replicas, with a stand-in for the engine: no runtime that can be had without the hardware is several processes."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from drivetrain.accumulation import Accumulation, GradientAccumulationPlugin
from drivetrain.config import resolve
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.launch import elastic
from drivetrain.launch.plan import LaunchPlan, plan_launch
from drivetrain_xla import Xla, replicas


class Engine:
    """Two replicas: this one, and one whose tensors are ten times this one's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reduced: list[float] = []
        self.launched: Any = None
        self.devices = 1
        runtime = SimpleNamespace(
            world_size=lambda: 2, addressable_device_count=lambda: self.devices, device_type=lambda: "TPU"
        )
        model = SimpleNamespace(
            REDUCE_SUM="sum",
            all_reduce=self.all_reduce,
            all_gather=lambda tensor: torch.cat([tensor, tensor * 10]),
            rendezvous=lambda tag, payload: [payload, payload],
        )
        engine = ModuleType("torch_xla")
        engine.device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
        engine.launch = self.launch  # type: ignore[attr-defined]
        engine.runtime, engine.core = runtime, SimpleNamespace(xla_model=model)  # type: ignore[attr-defined]
        for name, module in (("", engine), (".runtime", runtime), (".core", engine.core), (".core.xla_model", model)):
            monkeypatch.setitem(sys.modules, f"torch_xla{name}", module)

    def all_reduce(self, op: str, inputs: Any, scale: float = 1.0) -> Any:
        tensors = inputs if isinstance(inputs, list) else [inputs]
        self.reduced.append(scale)
        others = {"sum": lambda t: t.mul_(11 * scale), "max": lambda t: t.copy_(torch.maximum(t, t * 10))}
        for tensor in tensors:
            others[op](tensor)
        return inputs

    def launch(self, function: Any, args: Any) -> None:
        self.launched = (function, args)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_gradients_are_averaged_over_replicas(engine: Engine) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    replicas.average_gradients([model])
    assert model.weight.grad.tolist() == [[5.5, 5.5]]
    assert engine.reduced == [0.5]


def test_gradients_are_reduced_once_a_group(engine: Engine) -> None:
    backend, run = Xla(), SimpleNamespace(world=SimpleNamespace(size=2))
    model = nn.Linear(2, 1, bias=False)
    for last in (False, False, True):
        with backend.accumulate(run, [model], last):
            backend.backward(run, model(torch.ones(1, 2)).sum(), [model], {})
    assert model.weight.grad.tolist() == [[16.5, 16.5]]
    assert len(engine.reduced) == 1


def test_a_plain_loop_reduces_at_the_end_of_each_group(engine: Engine) -> None:
    backend, run = Xla(), SimpleNamespace(world=SimpleNamespace(size=2))
    model = nn.Linear(2, 1, bias=False)
    gate = Accumulation(2, GradientAccumulationPlugin(), lambda last: backend.accumulate(run, [model], last))
    frame = gate.enter(object)
    reduced = []
    for left in (5, 4, 3, 2, 1):
        gate.advance(frame, left)
        backend.backward(run, model(torch.ones(1, 2)).sum(), [model], {})
        reduced.append(len(engine.reduced))
    assert reduced == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(("op", "expected"), [("sum", [11.0, 22.0]), ("mean", [5.5, 11.0]), ("max", [10.0, 20.0])])
def test_reductions_leave_the_argument_alone(engine: Engine, op: str, expected: list[float]) -> None:
    given = torch.tensor([1.0, 2.0])
    assert replicas.all_reduce(given, op).tolist() == expected
    assert given.tolist() == [1.0, 2.0]


def test_gathered_and_broadcast_tensors(engine: Engine) -> None:
    assert replicas.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2], [10, 20]]
    assert replicas.broadcast(torch.tensor(3), 1).item() == 30
    assert replicas.all_gather_object({"a": 1}) == [{"a": 1}, {"a": 1}]


def plan(**settings: Any) -> LaunchPlan:
    resolved = resolve(command_line={"backend": "xla", **settings}, environment={})
    return attrs.evolve(plan_launch(resolved, "train.py", ["--lr", "1"]), resolved_config="/nowhere/resolved.yaml")


def test_several_processes_are_left_to_the_engines_launcher(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LaunchPlan] = []
    monkeypatch.setattr(elastic, "start", lambda plan: started.append(plan) or 7)
    assert (
        Xla().launch(plan(num_processes=4, num_machines=2, machine_rank=1, main_process_ip="a", main_process_port=1))
        == 7
    )
    (one,) = started
    assert (one.processes_total, one.module, one.script) == (1, True, "drivetrain_xla.replicas")
    assert list(one.script_args) == ["2", "1", "2", "script", "train.py", "--lr", "1"]
    assert one.resolved_config == "/nowhere/resolved.yaml"


def test_the_engines_launcher_is_called_with_the_plan(engine: Engine) -> None:
    replicas.main(["2", "0", "1", "script", "train.py", "--lr", "1"])
    assert engine.launched == (replicas._replica, (2, 0, 1, ("script", "train.py", "--lr", "1")))


def test_replicas_that_would_be_threads_are_refused_with_what_works(engine: Engine) -> None:
    engine.devices = 2
    errors: list[BaseException] = []

    def thread() -> None:
        try:
            replicas._replica(0, 2, 0, 1, ("script", "train.py"))
        except DrivetrainError as error:
            errors.append(error)

    one = threading.Thread(target=thread)
    one.start()
    one.join()
    assert "threads of one process" in str(errors[0])
    assert "xla.spmd: true" in str(errors[0])


def test_what_that_launcher_can_not_do_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="restarts nothing"):
        replicas.launch(plan(num_processes=2, max_restarts=1))
    with pytest.raises(ConfigError, match="Python scripts only"):
        replicas.launch(attrs.evolve(plan(num_processes=2), no_python=True))
