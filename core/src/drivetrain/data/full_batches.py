"""Telling a value repeated for a full batch from several entries for each sample of a short one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from drivetrain.nested import leaves, map_leaves

__all__ = ["FullBatches"]


@attrs.define
class FullBatches:
    """What metrics had for the full batches of a loader.

    Scripts weight the loss of a batch by its samples as ``gather_for_metrics(loss.repeat(batch_size))``, also for the
    last batch, which has fewer. How long the same things were for full batches tells whether that is meant.
    """

    lengths: set[int] = attrs.field(factory=set)
    """Entries that things had which were gathered for a full batch."""

    def fit(self, data: Any, own: int, full: int | None, is_list: Callable[[Any], bool]) -> Any:
        """What is as long as a full batch, cut to the samples of the batch in hand if that is shorter.

        Args:
            data: Any nesting of tensors, arrays and lists.
            own: Samples of the batch in hand, of this process.
            full: Samples of a full batch, of this process; None if batches vary in size.
            is_list: Says of a container that it has one entry a sample.
        """
        if full is None or not 0 < own <= full:
            return data
        if own == full:
            self.lengths.update(len(leaf) for leaf in leaves(data, is_list) if _has_rows(leaf))
            return data
        return map_leaves(lambda leaf: leaf[:own] if self._is_repeated(leaf, own, full) else leaf, data, is_list)

    def _is_repeated(self, leaf: Any, own: int, full: int) -> bool:
        if not _has_rows(leaf) or len(leaf) != full:
            return False
        per_sample, rest = divmod(full, own)
        # As many entries as several for each sample would be: then it was the same several in full batches.
        return bool(rest) or (full in self.lengths and per_sample * full not in self.lengths)


def _has_rows(leaf: Any) -> bool:
    return (isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0) or isinstance(leaf, (list, tuple))
