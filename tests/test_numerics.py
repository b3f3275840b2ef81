"""The main promise, on real processes: training over ranks equals plain torch in one process on all of their data.

The oracle never imports the library. Ranks report which samples they saw, and the oracle trains on those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

FEATURES, CLASSES = 8, 3
ALL_RANKS = [1, 2, 3, 4]


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """Made-up samples that know their number."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in getattr(model, "module", model).parameters()]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def assert_equal_on_all_ranks(ranks: Sequence[Sequence[Tensor]]) -> None:
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True))


@attrs.frozen
class Recipe:
    """What a training run is made of; sent to the ranks and to the oracle alike."""

    count: int
    batch: int
    """Samples in one rank's micro-batch."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    accumulation: int = 1
    shuffle: bool = False
    clip: float | None = None
    norm_type: float = 2.0
    epochs: int = 1
    settings: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Outcome:
    weights: list[Tensor]
    groups: list[list[int]]
    """Numbers of the samples behind each update, in this rank's order."""
    norms: list[float]


def train(recipe: Recipe) -> Outcome:
    """The loop under test."""
    from drivetrain import Accelerator, set_seed

    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=recipe.accumulation, **recipe.settings)
    model = net(seed=accelerator.process_index)  # rank 0's weights are everybody's
    optimizer = recipe.optimizer(model)
    loader = DataLoader(Samples(recipe.count), batch_size=recipe.batch, shuffle=recipe.shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    groups: list[list[int]] = [[]]
    norms = []
    for _ in range(recipe.epochs):
        for index, x, y in loader:
            with accelerator.accumulate(model):
                groups[-1] += index.tolist()
                accelerator.backward(cross_entropy(model(x), y))
                if recipe.clip is not None and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type)
                    norms.append(norm.item())
                if accelerator.sync_gradients:
                    groups.append([])
                optimizer.step()
                optimizer.zero_grad()
    return Outcome(weights(accelerator.unwrap_model(model)), groups[:-1], norms)


def oracle(recipe: Recipe, groups: Sequence[Sequence[int]]) -> Outcome:
    """Plain torch in one process: every update on one batch of all the samples behind it."""
    samples, model, norms = Samples(recipe.count), net(), []
    optimizer = recipe.optimizer(model)
    for group in groups:
        optimizer.zero_grad()
        cross_entropy(model(samples.x[list(group)]), samples.y[list(group)]).backward()
        if recipe.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type).item())
        optimizer.step()
    return Outcome(weights(model), [list(group) for group in groups], norms)


def check_against_oracle(pool: Any, ranks: int, recipe: Recipe, tolerance: float = 1e-6) -> list[list[int]]:
    """Train on real ranks, then compare; returns the samples behind each update."""
    outcomes: list[Outcome] = pool(ranks).run(train, recipe)
    groups = [joined(parts) for parts in zip(*[outcome.groups for outcome in outcomes], strict=True)]
    expected = oracle(recipe, groups)
    assert_equal_on_all_ranks([outcome.weights for outcome in outcomes])
    torch.testing.assert_close(outcomes[0].weights, expected.weights, rtol=0, atol=tolerance)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-5, atol=1e-6)
    return groups


# -------------------------------------------------------------------------------------------------------- equal weights


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_twenty_steps_equal_one_process_on_the_joined_batches(
    worker_pool: Any, ranks: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    recipe = Recipe(count=20 * 4 * ranks, batch=4, optimizer=optimizer)
    groups = check_against_oracle(worker_pool, ranks, recipe, tolerance=1e-6 if optimizer is sgd else 1e-5)
    assert groups == [list(range(k * 4 * ranks, (k + 1) * 4 * ranks)) for k in range(20)]


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_shuffled_epochs_equal_one_process_in_the_same_order(worker_pool: Any, ranks: int) -> None:
    recipe = Recipe(count=24, batch=2, shuffle=True, epochs=2)
    groups = check_against_oracle(worker_pool, ranks, recipe)
    epochs = [joined(groups[: len(groups) // 2]), joined(groups[len(groups) // 2 :])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1] != sorted(epochs[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_four_micro_batches_of_eight_equal_one_batch_of_thirty_two(worker_pool: Any, ranks: int) -> None:
    small = Recipe(count=32 * 5 * ranks, batch=8, accumulation=4)
    groups = check_against_oracle(worker_pool, ranks, small)
    assert [len(group) for group in groups] == [32 * ranks] * 5
    large: list[Outcome] = worker_pool(ranks).run(train, Recipe(count=small.count, batch=32))
    again: list[Outcome] = worker_pool(ranks).run(train, small)
    torch.testing.assert_close(again[0].weights, large[0].weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_last_group_is_a_mean_of_its_own_size(worker_pool: Any, ranks: int) -> None:
    # 7 micro-batches for each rank: groups of 3, 3 and 1.
    groups = check_against_oracle(worker_pool, ranks, Recipe(count=7 * 2 * ranks, batch=2, accumulation=3))
    assert [len(group) for group in groups] == [6 * ranks, 6 * ranks, 2 * ranks]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_sees_the_norm_of_the_joined_batch(worker_pool: Any, ranks: int, norm_type: float) -> None:
    recipe = Recipe(count=16 * ranks, batch=2, accumulation=2, clip=0.05, norm_type=norm_type)
    check_against_oracle(worker_pool, ranks, recipe)


# ------------------------------------------------------------------------------------------------------- several models


def train_two(ranks: int) -> list[Tensor]:
    """Two models with an optimizer each, one loss each and one that both share."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    models = [net(0), net(1)]
    optimizers = [sgd(models[0]), adamw(models[1])]
    loader = DataLoader(Samples(10 * 4 * ranks), batch_size=4)
    first, second, o1, o2, loader = accelerator.prepare(*models, *optimizers, loader)
    for number, (_, x, y) in enumerate(loader):
        if number % 2:
            accelerator.backward(cross_entropy(first(x) + second(x), y))
        else:
            accelerator.backward(cross_entropy(first(x), y))
            accelerator.backward(cross_entropy(second(x), y))
        for optimizer in (o1, o2):
            optimizer.step()
            optimizer.zero_grad()
    return [*weights(accelerator.unwrap_model(first)), *weights(accelerator.unwrap_model(second))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_models_with_an_optimizer_each_equal_one_process(worker_pool: Any, ranks: int) -> None:
    samples = Samples(10 * 4 * ranks)
    first, second = net(0), net(1)
    optimizers = [sgd(first), adamw(second)]
    for number in range(10):
        rows = slice(number * 4 * ranks, (number + 1) * 4 * ranks)
        x, y = samples.x[rows], samples.y[rows]
        if number % 2:
            cross_entropy(first(x) + second(x), y).backward()
        else:
            (cross_entropy(first(x), y) + cross_entropy(second(x), y)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = worker_pool(ranks).run(train_two, ranks)
    assert_equal_on_all_ranks(found)
    torch.testing.assert_close(found[0], [*weights(first), *weights(second)], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- number formats


def half_precision(precision: str, count: int) -> tuple[list[Tensor], list[str]]:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, seen = net(), []
    model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(str(output.dtype)))
    optimizer = sgd(model)
    loader = DataLoader(Samples(count), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, x, y in loader:
        output = model(x)
        seen.append(str(output.dtype))
        accelerator.backward(cross_entropy(output, y))
        optimizer.step()
        optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model)), sorted(set(seen))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_computes_in_halves_and_trains_like_autocast(
    worker_pool: Any, ranks: int, precision: str, dtype: torch.dtype
) -> None:
    count = 10 * 4 * ranks
    samples, model = Samples(count), net()
    optimizer = sgd(model)
    for step in range(10):
        rows = slice(step * 4 * ranks, (step + 1) * 4 * ranks)
        with torch.autocast("cpu", dtype=dtype):
            output = model(samples.x[rows])
        cross_entropy(output.float(), samples.y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = worker_pool(ranks).run(half_precision, precision, count)
    assert_equal_on_all_ranks([one for one, _ in found])
    torch.testing.assert_close(found[0][0], weights(model), rtol=0, atol=2e-2)
    assert all(not torch.equal(a, b) for a, b in zip(found[0][0], weights(net()), strict=True))
    assert [dtypes for _, dtypes in found] == [sorted([str(dtype), "torch.float32"])] * ranks
