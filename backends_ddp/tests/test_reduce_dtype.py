"""The dtype that a precision has gradients reduced in, against sums worked out by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from drivetrain.builtin import No
from drivetrain.plugin import Policy
from drivetrain.testing.pool import WorkerError

EPSILON = 2**-9
"""1 + 2^-9 is a float32 and a float16, and in bfloat16 it is 1."""


def settings(**section: Any) -> dict[str, Any]:
    return {"backend": "ddp", "device": "cpu", "ddp": section}


def gradients(reduce: str | None, dtype: str, values: list[float]) -> list[float]:
    """What is left of one gradient a rank after two updates' reductions; torch arranges its buckets anew in between."""
    from drivetrain import Accelerator

    with mock.patch.object(No, "policy", Policy(reduce=reduce, output=None)):
        accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False).to(getattr(torch, dtype)))
    x = torch.full((1, 1), values[accelerator.process_index], dtype=getattr(torch, dtype))
    found = []
    for _ in range(2):
        model.zero_grad()
        accelerator.backward(model(x).sum())
        (parameter,) = model.parameters()
        assert parameter.grad.dtype == parameter.dtype
        found.append(parameter.grad.item())
    return found


@pytest.mark.parametrize("section", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"])
@pytest.mark.parametrize(
    ("reduce", "expected"), [("bfloat16", 1.0), ("float16", 1 + EPSILON), ("float32", 1 + EPSILON), (None, 1 + EPSILON)]
)
def test_gradients_are_sent_in_the_dtype_of_the_precision(
    worker_pool: Any, reduce: str | None, expected: float, section: dict[str, Any]
) -> None:
    found = worker_pool(2).run(gradients, reduce, "float32", [1 + EPSILON] * 2, config=settings(**section))
    assert found == [[expected] * 2] * 2


def test_narrow_gradients_are_averaged_in_the_wider_dtype(worker_pool: Any) -> None:
    smallest = 2**-24  # of float16; half of it is nothing
    for reduce, expected in (("float32", smallest), (None, 0.0)):
        found = worker_pool(2).run(gradients, reduce, "float16", [smallest] * 2, config=settings())
        assert found == [[expected] * 2] * 2


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_a_communication_hook_that_says_otherwise_is_refused(worker_pool: Any, hook: str) -> None:
    with pytest.raises(WorkerError, match=f"ddp.comm_hook: {hook} and mixed_precision: no.*bfloat16, contradict") as e:
        worker_pool(2).run(gradients, "bfloat16", "float32", [1.0, 1.0], config=settings(comm_hook=hook))
    assert len(e.value.errors) == 2


def test_a_communication_hook_that_says_the_same_is_fine(worker_pool: Any) -> None:
    found = worker_pool(2).run(gradients, "bfloat16", "float32", [1 + EPSILON] * 2, config=settings(comm_hook="bf16"))
    assert found == [[1.0] * 2] * 2


def hooked(reduce: str | None) -> bool:
    from drivetrain import Accelerator

    with mock.patch.object(No, "policy", Policy(reduce=reduce, output=None)):
        accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    return bool(model._comm_hooks)


def test_a_dtype_that_gradients_have_already_costs_no_hook(worker_pool: Any) -> None:
    assert [worker_pool(2).run(hooked, name, config=settings())[0] for name in ("float32", None, "bfloat16")] == [
        False,
        False,
        True,
    ]
