"""Reading loaders that can't be told what to load: the whole stream goes by, and each process keeps its part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.collated import Collated, CollatedPieces, CountingCollate, leading_rows
from drivetrain.data.feed import Step, clone, with_next
from drivetrain.data.order import END, Order
from drivetrain.data.plan import Round, Sharding
from drivetrain.data.randomness import Isolation, derive_seed

__all__ = ["StreamFeed", "iterates_itself"]


def iterates_itself(loader: Any) -> bool:
    """Whether a loader's class has its own way of iterating, which dealing out indices would bypass."""
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator


class StreamFeed:
    """Batches of an ``IterableDataset``, or of a loader class that iterates in its own way.

    Args:
        source: The user's loader.
        sharding: Who gets what.
        rank: Set where each rank reads a stream of its own, and what it draws should differ from the others. None:
            all read the same one, and draw the same.
    """

    def __init__(self, source: Any, sharding: Sharding, rank: int | None = None) -> None:
        self.sharding = sharding
        self.order = Order(source.sampler if source.batch_sampler is None else source.batch_sampler, source.dataset)
        self._source = source
        self._rank = rank or 0
        self._generator = torch.Generator()
        self._counts_rows = sharding.data_size > 1 and source.batch_size is not None and not iterates_itself(source)
        changes = {"collate_fn": CountingCollate(source.collate_fn)} if self._counts_rows else {}
        self.inner = clone(source, generator=self._generator, **changes)

    def read(self, seed: int, epoch: int, start: int) -> Iterator[Step]:
        """This process's batches, from round ``start`` on. Those before it are read and dropped."""
        own = self.sharding.own
        for made, following in with_next(self._rounds(seed, epoch, start)):
            parts = [part for part in made.parts[own] if part is not None]
            if parts:
                last = following is None or not any(following.rows.sizes[own])
                yield CollatedPieces().join(parts).data, made.rows, 1 if last else None

    def whole_rounds(self, seed: int, epoch: int, start: int) -> Iterator[Round]:
        """The parts of all shards in each round."""
        for made in self._rounds(seed, epoch, start):
            yield Round([None if part is None else part.data for part in made.parts], made.rows)

    def batches(self, seed: int, epoch: int) -> Iterator[Any]:
        """The stream's batches as they come, on generators of their own: the same for each pass over an epoch."""
        self.order.begin(seed, epoch)
        self._generator.manual_seed(derive_seed(seed, epoch, "workers", self._rank))
        isolation = Isolation(derive_seed(seed, epoch, "stream", self._rank))
        iterator, batch = isolation.call(self._start)
        while batch is not END:
            yield batch
            if isolation.idle:
                yield from iterator
                return
            batch = isolation.call(next, iterator, END)

    def _start(self) -> tuple[Iterator[Any], Any]:
        iterator = iter(self.inner)
        return iterator, next(iterator, END)

    def _rounds(self, seed: int, epoch: int, start: int) -> Iterator[Round]:
        batches = map(self._counted, self.batches(seed, epoch))
        first = next(batches, None)
        if first is None:
            return iter(())
        sharding = self.sharding
        if not self._counts_rows and first.rows != sharding.batch_size:
            # Its class makes something else of a batch than one row a sample, so batches are only dealt out whole.
            sharding = attrs.evolve(sharding, batch_size=None)
        rounds = sharding.rounds(chain([first], batches), CollatedPieces())
        return islice(rounds, start, None) if start else rounds

    def _counted(self, batch: Any) -> Collated:
        if self.sharding.data_size == 1:
            return Collated(1, batch)  # nothing is cut or completed: no need to look
        return Collated(*batch) if self._counts_rows else Collated(leading_rows(batch), batch)

    def count(self, seed: int, epoch: int) -> int:
        """Batches of this process in an epoch, as far as the lengths of loader and dataset are right.

        Raises:
            TypeError: They have none, or the count depends on more.
        """
        samples: int | None = None
        size, drop = self._source.batch_size, self._source.drop_last
        if not isinstance(self._source.dataset, IterableDataset) or iterates_itself(self._source):
            batches = len(self._source)
        else:
            samples = len(self._source.dataset)
            if drop and size is not None:
                samples -= samples % size
            batches = samples if size is None else -(-samples // size)
        counted = self.sharding.count(batches, samples)
        if counted is None:
            raise TypeError(f"the length of this {type(self._source).__name__} is known only when it has been read")
        return counted

    @property
    def remainder(self) -> int:
        """Real samples of the last round: only the round itself can tell."""
        return -1
