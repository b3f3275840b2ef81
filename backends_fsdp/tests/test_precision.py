"""Number formats under both versions: what is computed, kept and reduced in which, and what an overflow stops."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from backends_fsdp.tests.recipes import (
    BOTH,
    UNITS,
    VERSIONS,
    batch,
    by_hand,
    close,
    full,
    joined,
    net,
    settings,
    sgd,
    train_steps,
)
from drivetrain.builtin import No
from drivetrain.plugin import Policy

# ------------------------------------------------------------------------------------------------------- number formats


def half(steps: int) -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model, dtypes = net(), {}
    model.blocks[0].inner.register_forward_hook(lambda _m, _i, out: dtypes.update(inside=str(out.dtype)))
    model, optimizer = accelerator.prepare(model, sgd(model))
    dtypes["master"] = str(next(iter(model.parameters())).dtype)
    for step in range(steps):
        x, y = batch(2 * step + accelerator.process_index)
        outputs = model(x)
        dtypes["outputs"] = str(outputs.dtype)
        accelerator.backward(cross_entropy(outputs, y))
        optimizer.step()
        optimizer.zero_grad()
    with accelerator.autocast():
        dtypes["autocast"] = str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    return full(accelerator, model), dtypes


POLICY = {"param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("backend", "precision", "section"),
    [
        *itertools.product(VERSIONS, ["bf16", "fp16"], [UNITS]),
        *itertools.product(VERSIONS, ["bf16"], [{**UNITS, "mixed_precision_policy": POLICY}]),
        *itertools.product(VERSIONS, ["fp16"], [{**UNITS, "mixed_precision_policy": {"param_dtype": "float16"}}]),
    ],
)
def test_mixed_precision_computes_in_halves_over_fp32_weights(
    worker_pool: Any, backend: str, precision: str, section: dict[str, Any]
) -> None:
    config = {**settings(backend, precision, **section), "fp16": {"init_scale": 256.0}}
    weights, dtypes = worker_pool(2).run(half, 5, config=config)[0]
    narrow = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert dtypes == {"inside": narrow, "master": "torch.float32", "outputs": "torch.float32", "autocast": narrow}
    close(weights, by_hand(5).weights, 0.03)


def reduced_in() -> float:
    """1 + 2^-12 is no half-precision number: what comes back tells in which dtype it travelled."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for value in (1.0, 2**-12):  # both are bfloat16 numbers, and their sum is not
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.full((1, 1), value)).sum())
    accelerator.backward(model(torch.zeros(1, 1)).sum())
    optimizer.step()
    state = accelerator.get_state_dict(model)
    return state["weight"].item() if state else 0.0


@pytest.mark.parametrize("section", [{}, {"mixed_precision_policy": POLICY}], ids=["autocast", "native"])
def test_gradients_are_added_up_and_reduced_in_fp32(worker_pool: Any, section: dict[str, Any]) -> None:
    found = worker_pool(2).run(reduced_in, config=settings("fsdp", "bf16", **section))[0]
    assert found == -(2**-12)


def reduced_by_policy() -> float:
    """A gradient of 1 + 2^-9, which is 1 in bfloat16, on every rank."""
    from drivetrain import Accelerator

    with mock.patch.object(No, "policy", Policy(reduce="bfloat16", output=None)):
        accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), 1 + 2**-9)).sum())
    optimizer.step()
    state = accelerator.get_state_dict(model)
    return state["weight"].item() if state else -1.0


@BOTH
@pytest.mark.parametrize(("ranks", "section"), [(2, {}), (4, {"replicate_size": 2})], ids=["2", "2x2"])
def test_gradients_are_reduced_in_the_dtype_of_the_precision(
    worker_pool: Any, backend: str, ranks: int, section: dict[str, Any]
) -> None:
    assert worker_pool(ranks).run(reduced_by_policy, config=settings(backend, **section)) == [-1.0] * ranks


def losses_and_norms() -> list[Any]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    return train_steps(accelerator, model, optimizer, 4, clip=0.5)


@BOTH
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_and_norms_under_mixed_precision_are_those_of_ddp(
    worker_pool: Any, backend: str, precision: str
) -> None:
    scale = {"fp16": {"init_scale": 256.0}}
    ours, theirs = (
        worker_pool(2).run(losses_and_norms, config={**config, **scale})
        for config in (settings(backend, precision, **UNITS), settings("ddp", precision))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def narrow_model() -> list[str]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(net().bfloat16())
    x, y = batch(0)
    accelerator.backward(cross_entropy(model(x), y))
    return sorted({str(p.dtype) for p in model.parameters()})


@BOTH
def test_trained_half_precision_weights_become_fp32_under_mixed_precision(worker_pool: Any, backend: str) -> None:
    assert worker_pool(2).run(narrow_model, config=settings(backend, "bf16")) == [["torch.float32"]] * 2


def overflow(which: list[str]) -> Any:
    """Rank 1 alone overflows, in a parameter of which one rank may hold nothing."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    wanted = [parameter for name, parameter in model.named_parameters() if name in which]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(wanted, lr=0.1))
    seen = []
    for step in range(3):
        x, y = batch(2 * step + accelerator.process_index)
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss * float("inf") if step == 1 and accelerator.process_index == 1 else loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.step_was_skipped)
    accelerator.gradients.update_scale()
    return seen, accelerator.scaler.get_scale(), full(accelerator, model)


@BOTH
@pytest.mark.parametrize(("ranks", "section"), [(2, {}), (4, {"replicate_size": 2})], ids=["2", "2x2"])
@pytest.mark.parametrize("which", [["scale"], ["head.bias"], ["first.bias", "blocks.0.inner.weight", "head.weight"]])
def test_an_overflow_on_one_rank_skips_the_update_on_all(
    worker_pool: Any, backend: str, which: list[str], ranks: int, section: dict[str, Any]
) -> None:
    config = {**settings(backend, "fp16", **UNITS, **section), "fp16": {"init_scale": 256.0}}
    found = worker_pool(ranks).run(overflow, which, config=config)
    assert [rank[:2] for rank in found] == [([False, True, False], 128.0)] * ranks
    start = net().state_dict()
    for name, value in found[0][2].items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, start[name]) is (name not in which)


def accumulate_scaled() -> Any:
    """Two groups of two; the first micro-batch of the second group overflows on rank 0 alone."""
    from drivetrain import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([model.head.bias, model.scale], lr=0.1))
    seen = []
    for number in range(6):
        x, y = batch(2 * number + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss * float("inf") if number == 2 and accelerator.process_index == 0 else loss)
            optimizer.step()
            if accelerator.sync_gradients:
                seen.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    return seen, full(accelerator, model)


@BOTH
def test_an_overflow_anywhere_in_a_group_skips_that_group(worker_pool: Any, backend: str) -> None:
    model = net()
    optimizer = torch.optim.SGD([model.head.bias, model.scale], lr=0.1)
    for numbers in ([0, 1, 2, 3], [8, 9, 10, 11]):
        x, y = joined(numbers)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
    config = {**settings(backend, "fp16", **UNITS), "fp16": {"init_scale": 256.0}}
    found = worker_pool(2).run(accumulate_scaled, config=config)
    assert [rank[0] for rank in found] == [[False, True, False]] * 2
    close(found[0][1], model.state_dict(), 0.01)


def checkpointed(steps: int) -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train_steps(accelerator, model, optimizer, steps)
    return full(accelerator, model)


@BOTH
def test_recomputed_activations_are_of_the_same_dtype(worker_pool: Any, backend: str) -> None:
    plain, again = (
        worker_pool(2).run(checkpointed, 2, config=settings(backend, "bf16", **UNITS, activation_checkpointing=on))[0]
        for on in (False, True)
    )
    close(again, plain, 1e-7)


class Shifted(nn.Linear):
    """Notes in which dtype its buffer and its input are."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [str(self.shift.dtype), str(x.dtype)]
        return super().forward(x.to(self.weight.dtype)) + self.shift


def dtypes_of_policy() -> list[str]:
    """Of the buffer and the input inside, of the output, and of the gradients."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(Shifted())
    output = model(torch.ones(1, 4))
    accelerator.backward(output.sum())
    gradients = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None and p.grad.numel()}
    return [*accelerator.unwrap_model(model).seen, str(output.dtype), *gradients]


@pytest.mark.parametrize(
    ("backend", "policy", "expected"),
    [
        ("fsdp", {}, ["float32", "bfloat16", "float32", "float32"]),
        (
            "fsdp",
            {"output_dtype": "bfloat16", "cast_forward_inputs": False},
            ["float32", "float32", "bfloat16", "float32"],
        ),
        ("fsdp1", {"cast_forward_inputs": False}, ["float32", "bfloat16", "float32", "float32"]),
        (
            "fsdp1",
            {"cast_forward_inputs": False, "cast_root_forward_inputs": False},
            ["float32", "float32", "float32", "float32"],
        ),
        ("fsdp1", {"buffer_dtype": "bfloat16"}, ["bfloat16", "bfloat16", "float32", "float32"]),
        ("fsdp1", {"keep_low_precision_grads": True}, ["float32", "bfloat16", "float32", "bfloat16"]),
    ],
)
def test_the_engine_casts_what_its_policy_names(
    worker_pool: Any, backend: str, policy: dict[str, Any], expected: list[str]
) -> None:
    config = settings(backend, mixed_precision_policy={**POLICY, **policy})
    assert worker_pool(2).run(dtypes_of_policy, config=config)[0] == [f"torch.{name}" for name in expected]
