"""What a backend can tell core beside its hooks: what it can't compute in, and how its schedules count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator
from drivetrain.errors import DrivetrainError


@pytest.mark.usefixtures("fresh_run")
def test_a_backend_refuses_what_it_cannot_compute_in_with_its_reason(open_site: Any) -> None:
    open_site.install_backend(
        "picky",
        """
        def refuses(self, policy, device_type):
            return f"no {policy.compute} on {device_type}" if policy.compute else None
        """,
    )
    with pytest.raises(
        DrivetrainError, match="'bf16' can't be combined with backend 'picky' on cpu: no bfloat16 on cpu"
    ):
        Accelerator(backend="picky", mixed_precision="bf16", cpu=True)
    assert Accelerator(backend="picky", cpu=True).mixed_precision == "no"


@pytest.mark.usefixtures("fresh_run")
def test_a_schedule_that_counts_updates_moves_by_one_whatever_the_data_size(open_site: Any) -> None:
    open_site.install_backend(
        "wide",
        """
        @hookimpl
        def init_world(self, device):
            from drivetrain.world import World
            return World(rank=0, size=1, device=device, data_size=4, feeds=4)

        @hookimpl
        def wrap_scheduler(self, scheduler):
            scheduler.counts = "updates"
            return scheduler
        """,
    )
    accelerator = Accelerator(backend="wide", cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    )
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


@pytest.mark.usefixtures("fresh_run")
def test_a_model_that_is_not_distributed_computes_in_the_precision_under_a_native_backend_too(open_site: Any) -> None:
    open_site.install_backend(
        "native",
        """
        @property
        def capabilities(self):
            return Capabilities(native_dtypes=frozenset({"bfloat16"}))
        """,
    )
    accelerator = Accelerator(backend="native", mixed_precision="bf16", cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = accelerator.prepare_model(model, evaluation_mode=True)
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.bfloat16]
