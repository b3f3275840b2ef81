"""Number formats and loss scaling in one process, against plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from core.tests.scalar import Scalar, numbers
from drivetrain import (
    Accelerator,
    GradScalerKwargs,
)
from drivetrain.errors import DrivetrainError
from drivetrain.plugin import Policy

pytestmark = pytest.mark.usefixtures("fresh_run")


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
