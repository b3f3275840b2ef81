"""Ties and optimizers survive a backend that replaces parameters."""

from __future__ import annotations

import copy

import torch
from torch import nn

from drivetrain.bundle import Bundle


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def replace_parameters(model: nn.Module) -> None:
    """What moving to another kind of device does: every name gets a parameter of its own."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.detach().clone()))


def test_optimizers_follow_replaced_parameters_with_their_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}], momentum=0.9
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    bundle = Bundle(models=[model], optimizers=[optimizer])
    bundle.record()
    replace_parameters(model)
    assert bundle.repoint() == 2
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight], [model.bias]]
    assert optimizer.state[model.weight]["momentum_buffer"] is momentum
    assert len(optimizer.state) == 2
    assert bundle.repoint() == 0


def test_ties_are_restored_within_and_across_models() -> None:
    first, second = Tied(), nn.Embedding(4, 3)
    second.weight = first.embed.weight
    bundle = Bundle(models=[first, second])
    bundle.record()
    replace_parameters(first)
    replace_parameters(second)
    assert first.head.weight is not first.embed.weight
    assert bundle.retie() == 2
    assert first.head.weight is first.embed.weight
    assert second.weight is first.embed.weight


def test_parameters_of_no_model_are_found() -> None:
    model, stray = nn.Linear(1, 1), nn.Parameter(torch.ones(5))
    bundle = Bundle(models=[model], optimizers=[torch.optim.SGD([model.weight, stray], lr=1)])
    bundle.record()
    assert [parameter is stray for parameter in bundle.strangers(0)] == [True]


def test_an_optimizer_over_two_models_belongs_to_both() -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([*models[2].parameters(), *models[0].parameters()], lr=1)
    bundle = Bundle(models=list(models), optimizers=[optimizer])
    bundle.record()
    assert bundle.models_of(0) == [models[0], models[2]]
    copy.copy(bundle)
