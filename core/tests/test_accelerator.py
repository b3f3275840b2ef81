"""The facade in one process, against plain torch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from core.tests.scalar import Scalar, numbers
from drivetrain import (
    Accelerator,
    GradientAccumulationPlugin,
    state,
)
from drivetrain.errors import DrivetrainError

pytestmark = pytest.mark.usefixtures("fresh_run")


# -------------------------------------------------------------------------------------------------------------- prepare


def test_prepare_keeps_order_and_passes_other_objects_through() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader, other = nn.Linear(1, 1), numbers(3), object()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    made = accelerator.prepare(scheduler, other, loader, optimizer, model)
    assert isinstance(made, tuple)
    assert made[1] is other
    assert made[0].scheduler is scheduler
    assert made[3].optimizer is optimizer
    assert isinstance(made[2], DataLoader)
    assert made[4] is model


def test_one_object_in_is_one_object_out() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    assert accelerator.prepare(model) is model
    assert accelerator.prepare("text") == "text"


def test_preparing_again_returns_what_was_made_the_first_time() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = nn.Linear(1, 1), numbers(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    first = accelerator.prepare(model, optimizer, loader)
    assert all(a is b for a, b in zip(first, accelerator.prepare(model, optimizer, loader), strict=True))
    assert all(a is b for a, b in zip(first, accelerator.prepare(*first), strict=True))
    assert len(accelerator.known.optimizers) == 1


def test_the_same_object_twice_in_one_call_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="Linear twice"):
        Accelerator(cpu=True).prepare(model, model)


@pytest.mark.parametrize("placement", [[True], True])
def test_device_placement_needs_one_entry_for_each_object(placement: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a list of one entry for each of 2 objects; got \[?True"):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), numbers(1), device_placement=placement)


@pytest.mark.parametrize("pack", [list, tuple, lambda things: dict(enumerate(things))])
def test_a_container_of_what_could_be_prepared_is_refused(pack: Any) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"argument 1 of prepare is a \w+ with a Linear in it.*prepare\(\*objects\)"):
        accelerator.prepare(numbers(1), pack([3, nn.Linear(1, 1)]))
    assert accelerator.prepare([1, "x"]) == [1, "x"]


def test_a_class_given_to_prepare_is_refused():
    with pytest.raises(TypeError, match=r"argument 1 of prepare is the class Linear.*Linear\(\.\.\.\)"):
        Accelerator().prepare(nn.Linear(1, 1), nn.Linear)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (3, "got int$"),
        (None, "got NoneType$"),
        (torch.optim.SGD([torch.zeros(1)]), "got SGD$"),
        (nn.Linear(1, 1).named_parameters(), "got generator of tuple$"),
    ],
    ids=["number", "None", "optimizer", "named parameters"],
)
def test_clipping_names_what_it_can_not_clip(wrong, got):
    with pytest.raises(TypeError, match=r"takes a tensor or an iterable of tensors.*" + got):
        Accelerator(cpu=True).clip_grad_norm_(wrong, 1.0)


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_clipping_refuses_a_norm_that_is_none(norm):
    with pytest.raises(ValueError, match=r"max_norm must be a number from 0; got (-1|nan)"):
        Accelerator(cpu=True).clip_grad_norm_(nn.Linear(1, 1).parameters(), norm)


@pytest.mark.parametrize("method", ["no_sync", "trigger_sync_in_backward"])
def test_contexts_of_a_model_take_a_model(method):
    context = getattr(Accelerator(cpu=True), method)([nn.Linear(1, 1)])
    with pytest.raises(TypeError, match=r"only models can be named.*got list"):
        context.__enter__()


@pytest.mark.parametrize("wrong", [[nn.Linear(1, 1)], "model", None], ids=["list", "text", "None"])
def test_accumulate_takes_models_only(wrong):
    with pytest.raises(TypeError, match=r"only models can be named.*got " + type(wrong).__name__):
        Accelerator(gradient_accumulation_steps=2).accumulate(wrong)


def test_clipping_by_value_without_gradients_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    accelerator.backward(100 * model(torch.ones(1, 1)).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    assert model.weight.grad.item() == pytest.approx(0.1)


# --------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("zero_first", [True, False], ids=["zero_grad first", "zero_grad last"])
@pytest.mark.parametrize("block", [True, False], ids=["accumulate", "plain"])
def test_the_four_spellings_of_the_accumulation_loop_agree(block: bool, zero_first: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Scalar()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(4))
    seen = []

    def micro_batch(x: torch.Tensor) -> None:
        if zero_first:
            optimizer.zero_grad()
        accelerator.backward(model(x))
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()

    for (x,) in loader:
        if block:
            with accelerator.accumulate(model):
                micro_batch(x)
        else:
            micro_batch(x)
        seen.append(model.w.item())
    assert seen == [1.0, -0.5, -0.5, -4.0]


def test_a_short_last_group_is_a_mean_of_its_own_size() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Scalar(0.0)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(torch.ones(5)), batch_size=1)
    )
    seen = []
    for (x,) in loader:
        with accelerator.accumulate():
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(model.w.item())
    assert seen == [0, -1, -1, -2, -3]


def test_a_fixed_short_group_keeps_the_full_divisor() -> None:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, short_group="fixed")
    )
    model = Scalar(0.0)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(torch.ones(5)), batch_size=1)
    )
    for (x,) in loader:
        accelerator.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
    assert model.w.item() == -2.5


def test_a_bad_batch_can_be_dropped() -> None:
    accelerator = Accelerator(cpu=True)
    model = Scalar(0.0)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(3))
    for (x,) in loader:
        accelerator.backward(model(x))
        if x.item() == 2:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert model.w.item() == -4.0


def train(accelerator: Accelerator, batch: int, clip: float | None = None) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch))
    norms = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if clip is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    assert (norm is None) == (not accelerator.sync_gradients)
                    if norm is not None:
                        norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulation_of_four_times_eight_equals_one_batch_of_thirty_two(clip: float | None) -> None:
    small, small_norms = train(Accelerator(cpu=True, gradient_accumulation_steps=4), 8, clip)
    state.reset()
    large, large_norms = train(Accelerator(cpu=True), 32, clip)
    for a, b in zip(small, large, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert small_norms == pytest.approx(large_norms, rel=1e-5)


# ----------------------------------------------------------------------------------------------------------- schedulers


def test_a_scheduler_moves_with_real_updates_only() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, numbers(8), scheduler)
    rates = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert scheduler.base_lrs == [1.0]


# ------------------------------------------------------------------------------------------------------------- wrappers


def test_optimizer_hooks_state_and_attributes_are_the_inner_ones() -> None:
    accelerator = Accelerator(cpu=True)
    model = Scalar()
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model, optimizer = accelerator.prepare(model, inner)
    calls = []
    optimizer.register_step_post_hook(lambda *args: calls.append(1))
    accelerator.backward(model(torch.ones(1)))
    optimizer.step()
    assert calls == [1]
    assert optimizer.state is inner.state
    assert optimizer.state_dict()["state"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    with pytest.raises(AttributeError):
        optimizer.nonsense


def test_unwrap_can_give_a_model_its_own_forward_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 4))
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(bare)
    assert bare(torch.ones(3, 2)).shape == (3, 4)


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the whole model"])
def test_what_the_user_compiled_does_not_show_in_parameter_names(whole: bool) -> None:
    accelerator = Accelerator(cpu=True)
    compiled = nn.Linear(2, 2)
    model = nn.Sequential(compiled if whole else torch.compile(compiled, backend="eager"), nn.Linear(2, 2))
    made = accelerator.prepare(torch.compile(model, backend="eager") if whole else model)
    assert accelerator.unwrap_model(made) is made
    assert accelerator.unwrap_model(made, keep_torch_compile=False) is model
    assert list(accelerator.get_state_dict(made)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


# ----------------------------------------------------------------------------------------------------- loops gone wrong


@pytest.mark.parametrize(
    "settings", [{"gradient_accumulation_steps": 2}, {"mixed_precision": "fp16"}], ids=["accumulation", "loss scaling"]
)
@pytest.mark.parametrize("clip", [True, False])
def test_a_bare_backward_is_refused_where_it_computes_something_else(settings: dict, clip: bool) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    model = Scalar()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(2))
    with pytest.raises(DrivetrainError, match=r"accelerator\.backward\(loss\)"):  # noqa: PT012
        for (x,) in loader:
            model(x).backward()
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def test_a_bare_backward_passes_where_it_computes_the_same() -> None:
    accelerator = Accelerator(cpu=True)
    model = Scalar()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1)).backward()
    optimizer.step()
    assert model.w.item() == 0.0


@pytest.mark.parametrize(("steps", "told"), [(1, 0), (2, 1)])
def test_an_optimizer_that_was_not_prepared_is_missed_once_where_it_matters(
    caplog: pytest.LogCaptureFixture, steps: int, told: int
) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    logging.getLogger("drivetrain").propagate = True
    with caplog.at_level("WARNING", logger="drivetrain"):
        for _ in range(3):
            accelerator.backward(model(torch.ones(1)))
    assert len([1 for record in caplog.records if "no optimizer was prepared" in record.getMessage()]) == told


def test_a_loader_whose_batches_were_all_dropped_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    from drivetrain import preparation

    with caplog.at_level("WARNING", logger="drivetrain"):
        logging.getLogger("drivetrain").propagate = True
        preparation._warn_of_nothing([1], [])
        preparation._warn_of_nothing([1], [1])
        preparation._warn_of_nothing(iter([1]), iter([]))
    assert [record.getMessage()[:35] for record in caplog.records] == ["a prepared loader has no batches: d"]


# ----------------------------------------------------------------------------------------- closures and wrong arguments


def test_a_closure_computes_as_in_torch_and_its_loss_is_returned() -> None:
    inputs, targets = torch.randn(8, 3), torch.randn(8, 1)

    def trained(accelerator: Accelerator | None) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        backward = torch.Tensor.backward
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
            backward = accelerator.backward

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            backward(loss)
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(3)], model.weight.detach()

    losses, weight = trained(Accelerator(cpu=True))
    expected, oracle = trained(None)
    assert losses == expected
    assert torch.equal(weight, oracle)


def test_a_closure_with_accumulation_is_refused_at_the_first_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Scalar()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(4))
    (x,) = next(iter(loader))
    accelerator.backward(model(x))
    with pytest.raises(DrivetrainError, match=r"step\(closure\) can't be combined with gradient accumulation"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("loss", [{"loss": torch.ones(())}, 3.0, None])
def test_what_is_no_loss_is_named(loss: Any) -> None:
    with pytest.raises(TypeError, match=f"takes the loss, a tensor; got {type(loss).__name__}"):
        Accelerator(cpu=True).backward(loss)


def test_clipping_a_model_says_what_to_pass() -> None:
    with pytest.raises(TypeError, match=r"not a model; pass Linear's \.parameters\(\)"):
        Accelerator(cpu=True).clip_grad_norm_(nn.Linear(1, 1), 1.0)
