"""Loss scaling where each rank sees only a part of the gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain.world import Run

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler by which an overflow on one rank skips the update on all.

    It unscales the pieces that this rank holds, and then asks the other ranks. So every rank must unscale the same
    optimizers in the same order, as it must call every collective.

    Args:
        run: The run.
        **options: For ``torch.amp.GradScaler``.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        super().__init__(run.world.device.type, **options)
        self._run = run

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale, and note for every rank whether any of them found a number that is not finite."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                if gradient.dtype == torch.float16 and not allow_fp16:
                    raise ValueError("gradients in float16 can't be unscaled: what overflowed in them is lost already")
                if gradient.numel():
                    alike[gradient.device, gradient.dtype].append(gradient)
        device = self._run.world.device
        anywhere = found_inf.to(device, copy=True)
        with torch.no_grad():
            for (where, _), gradients in alike.items():
                flag = torch.zeros_like(found_inf, device=where)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(where))
                anywhere = torch.maximum(anywhere, flag.to(device))
        return {device: self._run.hooks.all_reduce(run=self._run, tensor=anywhere, op="max", group=None)}
