"""Group *numerics*, first part: training equals plain torch in one process on the data of all shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.recipes import (
    WIDTH,
    Recipe,
    Samples,
    close,
    compare,
    follow,
    full_weights,
    mlp,
)
from drivetrain.testing.conformance.subject import Subject

__all__ = ["checks"]

checks = CheckList("numerics")


@checks("losses and weights are those of one process on the whole batch")
def whole_batch(subject: Subject) -> None:
    follow(subject, Recipe(batches=5))


@checks("accumulated micro-batches give the gradient of the whole batch")
def accumulated(subject: Subject) -> None:
    follow(subject, Recipe(batches=8, steps=4))


@checks("accumulate() may name no model")
def accumulate_all(subject: Subject) -> None:
    follow(subject, Recipe(batches=6, steps=2, named=False))


@checks("a short last group is a mean over its own micro-batches")
def short_group(subject: Subject) -> None:
    follow(subject, Recipe(batches=5, steps=3))


# -------------------------------------------------------------------------------------------------- kinds of models


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y


def tied() -> nn.Module:
    """The tied model, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied()


@checks("tied weights stay tied")
def ties(subject: Subject) -> None:
    ranks = follow(subject, Recipe(model=tied))
    weights = ranks[0].weights
    if not torch.equal(weights["first.weight"], weights["last.weight"]):
        raise Violation("first.weight and last.weight are one parameter, but differ after training")


def half_frozen() -> nn.Module:
    """A model of which the first layer is not trained."""
    model: Any = mlp()
    model[0].requires_grad_(False)
    return model


def sgd_of_trainable(model: nn.Module) -> Optimizer:
    """Only what is trained."""
    return SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)


@checks("frozen parameters stay as they are, and the others train")
def frozen(subject: Subject) -> None:
    ranks = follow(subject, Recipe(model=half_frozen, optimizer=sgd_of_trainable))
    start = half_frozen().state_dict()
    if not torch.equal(ranks[0].weights["0.weight"], start["0.weight"]):
        raise Violation("0.weight is frozen, but changed")


def grouped(model: nn.Module) -> Optimizer:
    """Two groups with learning rates and weight decays of their own."""
    layers: Any = model
    groups = [
        {"params": layers[0].parameters(), "lr": 0.2, "weight_decay": 0.1},
        {"params": layers[2].parameters(), "lr": 0.02},
    ]
    return SGD(groups, lr=1.0, momentum=0.5)


@checks("parameter groups keep their members, learning rates and weight decays")
def groups(subject: Subject) -> None:
    follow(subject, Recipe(optimizer=grouped))


@checks("a learning rate set on the prepared optimizer counts from the next step on")
def rates(subject: Subject) -> None:
    follow(subject, Recipe(rates=(0.2, 0.0, 0.05, 0.1)))


# -------------------------------------------------------------------------------------------------- several models


def several_models(subject: Subject) -> str | None:
    """Why two models can't be prepared in one run."""
    limit = subject.facts.capabilities.max_models
    return None if limit is None or limit >= 2 else f"the backend claims {limit} model(s) in a run"


def chained(batches: int) -> tuple[list[list[int]], list[float], dict[str, Tensor]]:
    """One loss through two models, an optimizer for each; samples, losses and full weights."""
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator

    accelerator = Accelerator()
    models: list[Any] = [mlp(), mlp()]
    optimizers: list[Any] = [SGD(models[0].parameters(), lr=0.2), SGD(models[1].parameters(), lr=0.05)]
    samples = Samples(WIDTH * batches * accelerator.run.world.data_size)
    loader = DataLoader(samples, batch_size=WIDTH)
    *models[:], optimizers[0], optimizers[1], loader = accelerator.prepare(*models, *optimizers, loader)
    seen, losses = [], []
    for index, x, y in loader:
        seen.append(index.tolist())
        loss = mse_loss(models[1](models[0](x)), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {
        f"{i}.{name}": w for i, model in enumerate(models) for name, w in full_weights(accelerator, model).items()
    }
    return seen, losses, weights


@checks("one loss trains two models with an optimizer each", unclaimed=several_models)
def one_loss_two_models(subject: Subject) -> None:
    ranks = subject.run(chained, 4)
    seen = [rank[0] for rank in ranks]
    start, weights, losses = _chained_by_hand(seen)
    for rank, (_, found, _) in enumerate(ranks):
        close(found, losses[rank], subject.tolerance, f"losses of rank {rank}")
    compare(subject, ranks[0][2], weights, start)


def _chained_by_hand(seen: Sequence[Sequence[list[int]]]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    pair = nn.ModuleList([mlp(), mlp()])
    optimizers = [SGD(pair[0].parameters(), lr=0.2), SGD(pair[1].parameters(), lr=0.05)]
    samples = Samples(1 + max(index for rank in seen for batch in rank for index in batch))
    start = {name: value.clone() for name, value in pair.state_dict().items()}
    losses: list[list[float]] = [[] for _ in seen]
    for batches in zip(*seen, strict=True):
        for own, index in zip(losses, batches, strict=True):
            loss = mse_loss(pair[1](pair[0](samples.x[index])), samples.y[index])
            own.append(loss.item())
            (loss / len(seen)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return start, dict(pair.state_dict()), losses


def prepare_many(count: int) -> int:
    """Prepare that many models; returns how many were."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    models = [mlp() for _ in range(count)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    accelerator.prepare(*models, *optimizers)
    return len(accelerator.known.models)


@checks(
    "no more models than claimed are accepted",
    unclaimed=lambda subject: (
        "the backend claims any number of models" if subject.facts.capabilities.max_models is None else None
    ),
)
def max_models(subject: Subject) -> None:
    limit = subject.facts.capabilities.max_models or 0
    expect(subject.run(prepare_many, limit), [limit] * subject.size, f"models prepared of {limit}")
    subject.refuse(prepare_many, limit + 1, what=f"preparing {limit + 1} models")


# ----------------------------------------------------------------------------------------------------------- formats


class Recording(nn.Module):
    """Notes the dtype in which a matrix product came out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen = y.dtype
        return y


def dtypes() -> tuple[str, str, bool]:
    """The dtype computed in, that of the outputs, and whether the core enters autocast for it."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = Recording()
    optimizer = SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    output = prepared(torch.ones(WIDTH, WIDTH, device=accelerator.device))
    inner: Any = accelerator.unwrap_model(prepared)
    return str(inner.seen), str(output.dtype), "forward" in vars(inner)


@checks("models compute in the dtype of the precision, and their outputs have the dtype it promises")
def formats(subject: Subject) -> None:
    policy, claims = subject.facts.policy, subject.facts.capabilities
    compute = policy.compute_dtype or torch.float32
    output = policy.output_dtype or compute
    native = policy.compute in claims.native_dtypes
    for seen, given, _ in subject.run(dtypes):
        if compute.itemsize > 1:  # a product in an 8-bit format comes out in a wider one
            who = f"the backend, which claims to compute natively in {policy.compute}" if native else "autocast"
            expect(seen, str(compute), f"dtype of a matrix product under {who}")
        expect(given, str(output), "dtype of the outputs of a prepared model")
