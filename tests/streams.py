"""Data of no length, for tests of loaders."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset

__all__ = ["Numbers"]


class Numbers(IterableDataset[int]):
    """A stream of 0, 1, 2, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))
