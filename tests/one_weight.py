"""A model whose gradient can be done in the head, and data for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["OneWeight", "Values"]


class OneWeight(nn.Module):
    """The loss w * x, so that the gradient is the mean of x."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).mean()


class Values(Dataset[Tensor]):
    """Numbers, a sample each."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.values[index]))
