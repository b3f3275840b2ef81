"""Small runs that are saved, and what is in their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from drivetrain import Accelerator, state
from drivetrain.checkpoint import files
from drivetrain.checkpoint.layout import Manifest

__all__ = ["check", "fill", "filled", "make", "simple", "value"]


def make(**options: Any) -> tuple[Accelerator, nn.Linear]:
    """A run with a model and an optimizer that has a state."""
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(3, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    return accelerator, model


def simple(*models: nn.Module, optimizer: Callable[..., Any] | None = None) -> Accelerator:
    """A new run of these models, with one optimizer of all their parameters."""
    state.reset()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*models)
    if optimizer is not None:
        accelerator.prepare(optimizer([p for model in models for p in model.parameters()]))
    return accelerator


def filled(value: float, *sizes: int) -> nn.Linear:
    """A layer all of whose parameters are one number."""
    model = nn.Linear(*(sizes or (2, 2)))
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    """Set all parameters to one number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def value(model: nn.Module) -> float:
    """The first number in a model."""
    return float(next(model.parameters()).detach().flatten()[0])


def check(directory: Path) -> float:
    """Make sure that a checkpoint is whole, file by file; returns what its weights are filled with."""
    manifest = Manifest.read(directory)
    for name, record in manifest.files.items():
        assert files.checksum(directory / name) == record, name
    return float(safetensors.torch.load_file(directory / "models/0/model.safetensors")["weight"][0, 0])
