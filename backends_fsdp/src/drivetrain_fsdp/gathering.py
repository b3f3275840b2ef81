"""How gathered parameters travel, where the default can't be: numbers of 8 bits as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["AllGatherOfBytes", "in_own_formats"]


def in_own_formats(model: nn.Module) -> bool:
    """Whether a parameter says itself as what it is gathered, such as in 8 bits."""
    return any(hasattr(parameter, "fsdp_pre_all_gather") for parameter in model.parameters())


class AllGatherOfBytes:
    """For ``FSDPModule.set_custom_all_gather``: not every communication library knows floating point in 8 bits."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather in one dimension."""
        if input_tensor.dtype.itemsize == 1:
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)
