"""What a piece of a tensor is, and how pieces make up a whole.

A piece is a run of consecutive elements in row-major order. That describes a tensor cut by its rows as well as a slice
of several tensors flattened into one, so that what one engine saved another can load, on any number of ranks.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

__all__ = ["Layout", "Part", "Piece"]


@attrs.frozen(eq=False)
class Piece:
    """What this rank holds of a tensor."""

    local: Tensor
    """The held elements, of any shape; written through."""
    start: int
    """Position of the first one in the flattened whole."""
    shape: tuple[int, ...]
    """Of the whole."""

    @property
    def stop(self) -> int:
        """Position after the last held element in the flattened whole."""
        return self.start + self.local.numel()

    def read(self) -> Tensor:
        """The held elements in one dimension."""
        return self.local.detach().contiguous().view(-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def write(self, flat: Tensor, at: int) -> None:
        """Put elements into the piece.

        Args:
            flat: In one dimension, on any device, of any dtype that casts.
            at: Position of the first one in the flattened whole.
        """
        if flat.numel() == self.local.numel():
            self.local.copy_(flat.view(self.local.shape))
        else:
            self.local.view(-1)[at - self.start : at - self.start + flat.numel()].copy_(flat)


@attrs.frozen
class Part:
    """Elements ``start`` to ``stop`` of a flattened tensor, and the lowest rank that holds exactly these."""

    start: int
    stop: int
    rank: int


@attrs.frozen
class Layout:
    """Where the pieces of one tensor are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    """They follow each other without gaps."""
