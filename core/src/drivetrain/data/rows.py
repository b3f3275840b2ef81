"""Which rows of a round are real: what a metric over all ranks must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.world import World

__all__ = ["Rows"]


@attrs.frozen
class Rows:
    """The rows of one round: the batches that all ranks got at the same time.

    Attributes:
        real: How many of each data shard's rows are samples of their own; repeated ones come after them.
        sizes: Rows each shard's batch has.
        own: Rows of this process's batch: of all the shards it feeds.
    """

    real: tuple[int, ...]
    sizes: tuple[int, ...]
    own: int

    @property
    def complete(self) -> bool:
        """Whether nothing is repeated in this round."""
        return self.real == self.sizes

    def of_processes(self, world: World) -> list[int]:
        """Rows of each process's batch; empty if shards and processes do not go together."""
        if len(self.sizes) != world.size * world.feeds:
            return []
        return [sum(self.sizes[first : first + world.feeds]) for first in range(0, len(self.sizes), world.feeds)]

    def are_followed_by(self, lengths: Sequence[int], world: World) -> bool:
        """Whether each process has as many entries for each of its rows as the others have.

        Args:
            lengths: Entries of each process.
            world: The run's.
        """
        batches = self.of_processes(world)
        per_row = sum(lengths) // sum(batches)
        return per_row > 0 and [rows * per_row for rows in batches] == list(lengths)

    def check_all_have_some(self, world: World) -> None:
        """Refuse to wait for a rank that has no batch in this round, and so is somewhere else.

        Raises:
            DrivetrainError: There is one.
        """
        without = [rank for rank, size in enumerate(self.of_processes(world)) if not size]
        if without:
            raise DrivetrainError(
                f"rank(s) {', '.join(map(str, without))} have no batch in this round, since even_batches is off, so "
                f"nothing can be gathered from them. Leave it on where metrics are computed: gather_for_metrics drops "
                f"the samples that it repeats"
            )

    @property
    def total(self) -> int:
        """Real rows of all ranks together."""
        return sum(self.real)

    def trim(self, gathered: Any, own_rows: int) -> Any:
        """Drop the repeated rows from what was gathered from all ranks.

        Where a sample has several rows (the boxes of an image, the choices of a question) they stay or go together.

        Args:
            gathered: Tensor or array joined along dimension 0 in rank order, or a list of one entry a row. Any other
                value, such as a loss a rank, comes back as it is.
            own_rows: Rows of this process's contribution.

        Returns:
            The real rows, in the same order.
        """
        if self.complete or self.own == 0 or own_rows == 0 or own_rows % self.own:
            return gathered
        per_row = own_rows // self.own
        if isinstance(gathered, (Tensor, np.ndarray)):
            length = gathered.shape[0] if gathered.ndim else -1
        else:
            length = len(gathered) if isinstance(gathered, (list, tuple)) else -1
        if length != per_row * sum(self.sizes):
            return gathered
        kept, start = [], 0
        for real, size in zip(self.real, self.sizes, strict=True):
            kept.append(gathered[start * per_row : (start + real) * per_row])
            start += size
        if isinstance(gathered, Tensor):
            return torch.cat(kept)
        if isinstance(gathered, np.ndarray):
            return np.concatenate(kept)
        return type(gathered)(item for part in kept for item in part)
