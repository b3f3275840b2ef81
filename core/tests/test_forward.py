"""Autocast on forward: own weights after a copy, own forward after removal, dtypes as promised."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from drivetrain.forward import AutocastForward


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale


def bf16(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.fixture
def model() -> Net:
    net = Net()
    AutocastForward.install(net, bf16, torch.float32)
    return net


X = torch.ones(1, 2)


def test_outputs_are_cast_but_computed_in_the_compute_dtype(model: Net) -> None:
    inner = []
    model.linear.register_forward_hook(lambda module, args, output: inner.append(output.dtype))
    assert model(X).dtype == torch.float32
    assert inner == [torch.bfloat16]


def test_outputs_may_stay_in_the_compute_dtype() -> None:
    net = Net()
    AutocastForward.install(net, bf16, None)
    assert net(X).dtype == torch.bfloat16


def test_a_deep_copy_runs_its_own_weights(model: Net) -> None:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(X).abs().sum() == 0
    assert twin(X).abs().sum() > 0


def test_a_pickled_model_has_its_own_forward_again(model: Net) -> None:
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(X).dtype == torch.float32
    with torch.no_grad():
        loaded.linear.weight.zero_()
        loaded.linear.bias.fill_(3)
    assert loaded(X).tolist() == [[3, 3]]


def test_removing_it_gives_the_models_own_forward_back(model: Net) -> None:
    AutocastForward.remove(model)
    assert "forward" not in vars(model)
    assert model(X, scale=2.0).shape == (1, 2)


def test_a_forward_the_user_put_on_the_instance_is_kept() -> None:
    net = Net()
    own = net.forward = lambda x: x + 1
    AutocastForward.install(net, bf16, torch.float32)
    AutocastForward.install(net, bf16, torch.float32)
    assert torch.equal(net(X), X + 1)
    AutocastForward.remove(net)
    assert net.forward is own


def test_the_signature_is_the_models_own(model: Net) -> None:
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
