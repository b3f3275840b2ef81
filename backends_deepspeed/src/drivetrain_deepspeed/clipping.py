"""Clipping gradients of which each rank holds a part, in place, at the moment the user asks for it.

The engine itself clips inside of its step, by the 2-norm of whole models, to a number from its configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.world import Run
from drivetrain_deepspeed import partitions

__all__ = ["clip_norm", "clip_value"]

Parts = Mapping[Any, Sequence[nn.Parameter]]
"""Parameters by the optimizer of the engine that trains them."""


def clip_norm(run: Run, parts: Parts, max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``. Every rank calls it.

    Args:
        run: The run.
        parts: What is clipped together. Gradients are reduced.
        max_norm: The largest norm allowed.
        norm_type: p of the p-norm, above 0; may be ``inf``.

    Returns:
        The norm before, the same 0-d float32 tensor on every rank.
    """
    if not norm_type > 0:
        raise ValueError(f"the p of a norm must be above 0, got {norm_type}")
    device = run.world.device
    own = [
        _norm(partitions.gradients(zero, held), norm_type, device) / partitions.loss_scale(zero)
        for zero, held in parts.items()
    ]
    mine = torch.linalg.vector_norm(torch.stack(own), norm_type)
    everyone: Tensor = run.hooks.all_gather(run=run, tensor=mine, group=None)
    norm = torch.linalg.vector_norm(everyone, norm_type)  # the norm of norms is the norm
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for zero, held in parts.items():
        partitions.update_gradients(zero, held, lambda gradient: gradient.mul_(factor.to(gradient.device)))
    return norm


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    return nn.utils.get_total_norm([gradient.float() for gradient in gradients], norm_type).to(device)


def clip_value(parts: Parts, value: float) -> None:
    """Clamp every gradient element to ``[-value, value]``."""
    for zero, held in parts.items():
        bound = value * partitions.loss_scale(zero)
        partitions.update_gradients(zero, held, functools.partial(torch.clamp_, min=-bound, max=bound))
