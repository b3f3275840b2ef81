"""A model whose gradient is its input, and data for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Scalar", "numbers"]


class Scalar(nn.Module):
    """loss = w * x, so that the gradient is x."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).mean()


def numbers(n: int, batch: int = 1) -> DataLoader:
    """A loader of 1, 2, ... n."""
    return DataLoader(TensorDataset(torch.arange(1.0, n + 1)), batch_size=batch)
