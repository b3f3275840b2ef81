"""Clipping by the norm of gradients of which each rank holds a piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.world import Run

__all__ = ["clip_norm", "clip_value"]


@torch.no_grad()  # type: ignore[untyped-decorator]
def clip_norm(
    run: Run, pieces: Sequence[Tensor], wholes: Sequence[Tensor], group: Any, max_norm: float, norm_type: float
) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``. Every rank calls it for the same parameters.

    Args:
        run: The run.
        pieces: This rank's parts of gradients that are cut over ``group``. Scaled in place.
        wholes: Gradients that are the same on every rank. Scaled in place.
        group: Process group.
        max_norm: The largest norm allowed.
        norm_type: p of the p-norm, above 0; may be ``inf``.

    Returns:
        The norm before, 0-d float32, the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"the p of a norm must be above 0, got {norm_type}")
    own, common = (_norm(gradients, norm_type, run.world.device) for gradients in (pieces, wholes))
    everyone = run.hooks.all_gather(run=run, tensor=own, group=group)
    norm = torch.linalg.vector_norm(torch.cat([everyone, common.view(1)]), norm_type)  # the norm of norms is the norm
    _scale([*pieces, *wholes], torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Of this rank's, in float32 whatever their dtype is: it is sent to the others."""
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float32, device=device)
    return nn.utils.get_total_norm(held, norm_type).to(device, torch.float32)


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_device[gradient.device].append(gradient)
    for device, held in by_device.items():
        torch._foreach_mul_(held, factor.to(device))


@torch.no_grad()  # type: ignore[untyped-decorator]
def clip_value(gradients: Sequence[Tensor], limit: float) -> None:
    """Clamp every element to ``[-limit, limit]``, in place."""
    for gradient in gradients:
        gradient.clamp_(-limit, limit)
