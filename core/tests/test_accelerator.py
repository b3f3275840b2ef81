"""The facade in one process, against plain torch."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
    PartialState,
    state,
)
from drivetrain.errors import DrivetrainError, StateConflictError
from drivetrain.plugin import Policy


@pytest.fixture(autouse=True)
def _fresh_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("DRIVETRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DRIVETRAIN_HOME", "/nonexistent")
    state.reset()
    yield
    state.reset()


class Scalar(nn.Module):
    """loss = w * x, so that the gradient is x."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).mean()


def numbers(n: int, batch: int = 1) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(1.0, n + 1)), batch_size=batch)


# ---------------------------------------------------------------------------------------------------------- prepare


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


def test_device_placement_needs_one_entry_for_each_object() -> None:
    with pytest.raises(ValueError, match="1 entries for 2 objects"):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), numbers(1), device_placement=[True])


# ----------------------------------------------------------------------------------------------------- accumulation


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


# ------------------------------------------------------------------------------------------------------- schedulers


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


# -------------------------------------------------------------------------------------------------- mixed precision


def test_bf16_computes_low_and_returns_fp32() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.scaler is None
    model = accelerator.prepare(nn.Linear(2, 2))
    inner = []
    handle = model.register_forward_hook(lambda module, args, output: inner.append(output.dtype))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    handle.remove()
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_with_precision_no_forward_is_untouched() -> None:
    model = Accelerator(cpu=True).prepare(nn.Linear(2, 2))
    assert "forward" not in vars(model)


def test_fp16_on_the_cpu_really_is_fp16_and_scales_the_loss() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.bias.grad.tolist() == [1024.0, 1024.0]
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert norm.item() == pytest.approx(6**0.5)
    before = model.bias.detach().clone()
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(model.bias, before - 0.1)


def test_an_overflow_skips_its_own_optimizer_and_scheduler_only() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    models = [Scalar(), Scalar()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    a, b, oa, ob, sa, sb = accelerator.prepare(*models, *optimizers, *schedulers)
    accelerator.backward(a(torch.tensor([float("inf")])))
    accelerator.backward(b(torch.tensor([1.0])))
    for optimizer, scheduler in ((oa, sa), (ob, sb)):
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert (oa.step_was_skipped, ob.step_was_skipped) == (True, False)
    assert (a.w.item(), b.w.item()) == (1.0, 0.0)
    assert (sa.get_last_lr(), sb.get_last_lr()) == ([1.0], [0.5])
    accelerator.backward(b(torch.tensor([1.0])))
    assert accelerator.scaler.get_scale() == 32768.0, "backed off once, for the group"


def test_a_gradient_that_was_clipped_and_then_dropped_does_not_block_the_next_group() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = Scalar()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(3))
    for (x,) in loader:
        accelerator.backward(model(x))
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        if x.item() == 2:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert model.w.item() == -3.0


def test_a_model_already_in_fp16_is_refused_at_prepare_with_the_cure() -> None:
    with pytest.raises(DrivetrainError, match=r"weight.*fp32"):
        Accelerator(cpu=True, mixed_precision="fp16").prepare(nn.Linear(2, 2).half())


def test_a_closure_with_loss_scaling_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = Scalar()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1)))
    with pytest.raises(DrivetrainError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_an_ema_copy_of_a_prepared_model_has_its_own_weights() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Scalar(1.0))
    ema = copy.deepcopy(model)
    with torch.no_grad():
        model.w.fill_(5.0)
    assert ema(torch.ones(1)).item() == 1.0


# ---------------------------------------------------------------------------------------------------------- wrappers


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


def test_compiled_parts_do_not_show_in_parameter_names() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2))
    made = accelerator.prepare(model)
    assert accelerator.unwrap_model(made) is made
    accelerator.unwrap_model(made, keep_torch_compile=False)


# ------------------------------------------------------------------------------------------------------------- state


def test_a_second_accelerator_shares_the_run_and_keeps_its_own_count() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4)
    second = Accelerator()
    assert second.run is first.run
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)
    assert GradientState().num_steps == 1


def test_a_conflicting_second_accelerator_names_both_values() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(StateConflictError, match=r"bf16.*fp16"):
        Accelerator(mixed_precision="fp16")


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


def test_a_loader_whose_batches_were_all_dropped_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    from drivetrain import preparation

    with caplog.at_level("WARNING", logger="drivetrain"):
        logging.getLogger("drivetrain").propagate = True
        preparation._warn_of_nothing([1], [])
        preparation._warn_of_nothing([1], [1])
        preparation._warn_of_nothing(iter([1]), iter([]))
    assert [record.getMessage()[:35] for record in caplog.records] == ["a prepared loader has no batches: d"]


def test_a_fixed_loss_scale_stays_after_an_overflow_that_is_still_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(compute="float16", loss_scale=128.0)
    monkeypatch.setattr("drivetrain.builtin.Fp16.policy", property(lambda self: policy))
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = Scalar()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    skipped = []
    for x in (1.0, float("inf"), 1.0):
        accelerator.backward(model(torch.tensor([x])))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        assert accelerator.scaler.get_scale() == 128.0
    accelerator.gradients.update_scale()
    assert accelerator.scaler.get_scale() == 128.0
    assert skipped == [False, True, False]
    assert model.w.item() == -1.0
