"""Right values for reported faults in training steps, where no other test has them.

Everything that needs ranks runs on two real ones, in tasks that take milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from drivetrain import Accelerator, GradientAccumulationPlugin, state
from drivetrain.testing.logs import log_lines


class OneWeight(nn.Module):
    """The loss w * x, so that the gradient is the mean of x."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).mean()


def weight(accelerator: Any, model: nn.Module) -> Tensor:
    """The parameter of a prepared model."""
    return accelerator.unwrap_model(model).w


# --------------------------------------------------------------------------------------------------------- accumulation


def accumulate_two() -> list[list[float]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = accelerator.prepare(OneWeight(), OneWeight())
    found = []
    for factor in (1.0, 10.0):
        x = torch.tensor(factor * (accelerator.process_index + 1))
        with accelerator.accumulate(*models):
            accelerator.backward(models[0](x) + models[1](x))
        found.append([weight(accelerator, model).grad.item() for model in models])
    return found


def test_two_models_are_reduced_together_at_the_end_of_their_group(worker_pool: Any) -> None:
    assert worker_pool(2).run(accumulate_two) == [[[0.5, 0.5], [8.25, 8.25]], [[1.0, 1.0], [8.25, 8.25]]]


TOKENS = [[[1.0], [2.0, 3.0, 4.0]], [[5.0, 6.0, 7.0, 8.0], [9.0, 10.0]]]
"""Values of the tokens of each rank's micro-batches."""


def weigh_tokens(short_group: str) -> float:
    plugin = GradientAccumulationPlugin(num_steps=2, short_group=short_group)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(OneWeight())
    mine = [torch.tensor(values) for values in TOKENS[accelerator.process_index]]
    tokens = accelerator.reduce(torch.tensor(sum(map(len, mine))), "sum")
    for values in mine:
        with accelerator.accumulate(model):
            loss = model(values) * len(values)
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens)
    return weight(accelerator, model).grad.item()


@pytest.mark.parametrize("short_group", ["mean", "fixed"])
def test_a_loss_weighted_by_tokens_has_the_gradient_of_all_tokens_at_once(worker_pool: Any, short_group: str) -> None:
    assert worker_pool(2).run(weigh_tokens, short_group) == [pytest.approx(5.5)] * 2


def nest_no_sync() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(OneWeight())
    x = torch.tensor(accelerator.process_index + 1.0)
    seen = []
    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            accelerator.backward(model(x))
        accelerator.backward(model(x))  # still apart
        seen.append(weight(accelerator, model).grad.item())
    accelerator.backward(model(x))
    return [*seen, weight(accelerator, model).grad.item()]


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp1"])
def test_the_end_of_an_inner_no_sync_is_not_the_end_of_the_outer(worker_pool: Any, backend: str) -> None:
    found = worker_pool(2).run(nest_no_sync, config={"backend": backend})
    assert [last for _, last in found] == [4.5, 4.5]
    assert [apart for apart, _ in found] == [2.0, 4.0]


def clip_each_micro_batch(precision: str) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = OneWeight(1.0)
    ranks = accelerator.num_processes
    values = [float(value) for value in range(1, 6) for _ in range(ranks)]
    model, optimizer, loader = accelerator.prepare(model, SGD(model.parameters(), lr=1.0), DataLoader(values))
    seen = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            accelerator.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(weight(accelerator, model).item())
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_gradients_may_be_clipped_after_each_micro_batch(worker_pool: Any, ranks: int, precision: str) -> None:
    # Gradients are means 1.5, 3.5 and 5, of which the last two are clipped to 2.
    found = worker_pool(ranks).run(clip_each_micro_batch, precision)
    assert found == [[1.0, *[pytest.approx(value, abs=1e-5) for value in (-0.5, -0.5, -2.5, -4.5)]]] * ranks


def short_groups() -> list[str]:
    with log_lines() as lines:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = OneWeight()
        loader = DataLoader([1.0] * 3 * accelerator.num_processes)
        model, optimizer, loader = accelerator.prepare(model, SGD(model.parameters(), lr=1.0), loader)
        for _ in range(2):
            for x in loader:
                accelerator.backward(model(x))
                optimizer.step()
                optimizer.zero_grad()
    return [line for line in lines if "micro-batches of a group" in line]


def test_a_short_group_is_mentioned_once(worker_pool: Any) -> None:
    (line,), others = worker_pool(2).run(short_groups)
    assert line.startswith("the loader ended after 1 of 2 micro-batches")
    assert others == []


# ----------------------------------------------------------------------------------------------------------- schedulers


def mention_schedulers(counts: str) -> list[str]:
    with log_lines() as lines:
        accelerator = Accelerator(cpu=True, scheduler_counts=counts)
        model = accelerator.prepare(OneWeight())
        for _ in range(2):
            optimizer = SGD(model.parameters(), lr=1.0)
            accelerator.prepare(optimizer, StepLR(optimizer, 1))
    return [line for line in lines if "scheduler" in line]


def test_that_schedulers_move_once_for_each_shard_is_said_once(worker_pool: Any) -> None:
    (line,), others = worker_pool(2).run(mention_schedulers, "shards")
    assert line.startswith("one update moves a scheduler by 2 steps")
    assert others == []
    assert worker_pool(2).run(mention_schedulers, "updates") == [[], []]


class Halving:
    """A scheduler that is no torch class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def halve(order: Sequence[str]) -> list[float]:
    """The learning rate after each of four micro-batches in groups of two."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, scheduler_counts="updates")
    model = accelerator.prepare(OneWeight())
    inner = SGD(model.parameters(), lr=1.0)
    given: dict[str, Any] = {
        "optimizer": inner,
        "scheduler": Halving(inner) if "own" in order else StepLR(inner, 1, 0.5),
    }
    made = {name: accelerator.prepare(given[name]) for name in order if name in given}
    loader = accelerator.prepare(DataLoader([1.0] * 4 * accelerator.num_processes))
    rates = []
    for x in loader:
        accelerator.backward(model(x))
        for name in ("optimizer", "scheduler"):
            made[name].step()
        made["optimizer"].zero_grad()
        rates.append(inner.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    "order",
    [("optimizer", "scheduler"), ("scheduler", "optimizer"), ("own", "optimizer", "scheduler")],
    ids=["optimizer first", "scheduler first", "no torch class"],
)
def test_any_scheduler_prepared_in_any_order_moves_with_real_updates(worker_pool: Any, order: Sequence[str]) -> None:
    assert worker_pool(2).run(halve, order) == [[1.0, 0.5, 0.5, 0.25]] * 2


def plateau() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = OneWeight()
    optimizer = SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    )
    rates = []
    for _ in range(4):
        accelerator.backward(model(torch.tensor(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_measurement_counts_once_however_many_ranks_there_are(worker_pool: Any) -> None:
    # The first is the best; of those that follow two are one too many.
    assert worker_pool(2).run(plateau) == [[1.0, 1.0, 0.5, 0.5]] * 2


def foreign_optimizer() -> list[str]:
    class Foreign:
        param_groups: list[Any] = []

        def step(self) -> None: ...

    with log_lines() as lines:
        accelerator = Accelerator(cpu=True)
        optimizer = Foreign()
        assert accelerator.prepare(optimizer) is optimizer
    return [line for line in lines if "Foreign" in line]


def test_an_optimizer_that_is_none_of_torchs_is_returned_with_a_warning(worker_pool: Any) -> None:
    ((line,),) = worker_pool(1).run(foreign_optimizer)
    assert "neither gradient accumulation nor loss scaling hold back its step" in line


# ------------------------------------------------------------------------------------------------------------ precision


class Output(OrderedDict):  # type: ignore[type-arg]
    """A mapping with attributes, as many models return."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Output:
        logits = self.layer(x)
        return Output(loss=logits.sum(), logits=logits, ids=logits.argmax(1))


def answer() -> list[Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Answering())
    output = model(torch.ones(3, 2))
    accelerator.backward(output.loss)
    return [type(output).__name__, *(str(value.dtype) for value in output.values()), model.layer.bias.grad.tolist()]


@pytest.mark.parametrize("output", ["float32", "bfloat16"])
def test_outputs_keep_their_type_and_have_the_dtype_that_was_asked_for(worker_pool: Any, output: str) -> None:
    (found,) = worker_pool(1).run(answer, config={"bf16": {"output": output}})
    assert found == ["Output", f"torch.{output}", f"torch.{output}", "torch.int64", [3.0] * 4]


class TwoDtypes(nn.Module):
    """Layers whose weights have different dtypes, as where a part was loaded in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(2, 3)
        self.narrow = nn.Linear(3, 1).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.whole(x).bfloat16()).float().square().mean()


def two_dtypes() -> TwoDtypes:
    torch.manual_seed(0)
    return TwoDtypes()


def rows(number: int) -> Tensor:
    return torch.randn(2, 2, generator=torch.Generator().manual_seed(number))


def train_two_dtypes() -> float:
    """The loss on rows that were not trained on, after three steps."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = two_dtypes()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    for step in range(3):
        accelerator.backward(model(rows(2 * step + accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    return model(rows(9)).item()


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp1"])
def test_weights_of_two_dtypes_train_together_in_half_precision(worker_pool: Any, backend: str) -> None:
    model = two_dtypes()
    before = model(rows(9)).item()
    optimizer = SGD(model.parameters(), lr=0.5)
    for step in range(3):
        model(torch.cat([rows(2 * step), rows(2 * step + 1)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    right = model(rows(9)).item()
    assert abs(right - before) > 0.1
    found = worker_pool(2).run(train_two_dtypes, config={"backend": backend})
    assert found == [pytest.approx(right, abs=0.1 * abs(right - before))] * 2


def load_half(directory: str) -> tuple[str, list[float]]:
    """A checkpoint of half-precision weights, loaded into a model in full precision."""
    accelerator = Accelerator(cpu=True)
    saved = accelerator.prepare(nn.Linear(2, 1, bias=False).bfloat16())
    nn.init.constant_(saved.weight, 0.5)
    accelerator.save_state(directory)
    state.reset()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    accelerator.load_state(directory)
    return str(model.weight.dtype), model.weight.flatten().tolist()


def test_a_checkpoint_in_another_dtype_leaves_the_model_its_own(worker_pool: Any, tmp_path: Path) -> None:
    assert worker_pool(1).run(load_half, str(tmp_path / "state")) == [("torch.float32", [0.5, 0.5])]
