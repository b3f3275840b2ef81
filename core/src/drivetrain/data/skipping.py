"""Leaving out the first batches of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.feed import clone
from drivetrain.data.loader import DataLoaderShard
from drivetrain.data.stream import iterates_itself

__all__ = ["skip_first_batches"]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader like the one given, whose first pass leaves out the epoch's first batches.

    Skipped samples of map-style data are not loaded; a stream has to be read. Later passes are whole. The number counts
    from the epoch's start: it replaces the position of a loader whose state was loaded.

    Args:
        dataloader: A prepared loader, or any ``DataLoader``.
        num_batches: Batches to leave out, as this process counts them.

    Raises:
        TypeError: It is no ``DataLoader``.
        ValueError: The number is negative.
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"skip_first_batches takes a DataLoader, not {type(dataloader).__name__}")
    if num_batches < 0:
        raise ValueError(f"num_batches must be 0 or more; got {num_batches}")
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader.dataset, IterableDataset) or iterates_itself(dataloader):
        return _SkippingLoader(dataloader, num_batches)
    name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    return clone(dataloader, **{name: _SkippingSampler(getattr(dataloader, name), num_batches)})


class _SkippingSampler:
    """A sampler whose first pass leaves out what comes first."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self.sampler = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(iter(self.sampler), skip, None)

    def __len__(self) -> int:
        return max(len(self.sampler) - self._skip, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


class _SkippingLoader(DataLoader):
    """A loader that reads what it leaves out in its first pass. Its settings are the source's."""

    def __init__(self, source: Any, skip: int) -> None:
        self.__dict__.update(source.__dict__)  # DataLoader's own __init__ would build another loader
        self._skipped_source = source
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(iter(self._skipped_source), skip, None)

    def __len__(self) -> int:
        return max(len(self._skipped_source) - self._skip, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "_skipped_source":
            raise AttributeError(name)
        return getattr(self._skipped_source, name)
