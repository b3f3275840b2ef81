"""Reading map-style data: indices are dealt out before anything is loaded."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import attrs
import torch
from torch.utils.data import BatchSampler

from drivetrain.data.collated import Collated, CollatedPieces, leading_rows
from drivetrain.data.feed import Step, clone, with_next
from drivetrain.data.order import END, Order
from drivetrain.data.plan import IndexPieces, KeyPieces, Round, Sharding
from drivetrain.data.randomness import Isolation, derive_seed
from drivetrain.data.rows import Rows
from drivetrain.data.worker_draws import SeededBatch, SeededDataset, SeededStart

__all__ = ["IndexFeed"]

_ROUNDS_TOGETHER, _SAMPLES_TOGETHER = 64, 65536
"""How far ahead rounds are dealt out where the sampler is torch's own, so that nobody can tell. Done for each step by
itself it costs several times as much: the step has driven the code for it out of the processor's caches."""


@attrs.define(eq=False)
class _Pass:
    """One walk of the plan. Workers read ahead, so what the loader hands out lags behind ``rounds``."""

    rounds: Iterator[Round]
    handed: deque[tuple[Rows, int]] = attrs.field(factory=deque)
    """For each round that went to the workers: its rows, and how many batches it takes to load it."""
    seeds: Iterator[int] | None = None
    """What each batch is drawn from in the worker that loads it; None: it is loaded in this process."""


@attrs.define(eq=False)
class _PlanSampler:
    """Stands where the loader's (batch) sampler stood; each ``iter`` walks the pass that was set before it.

    It knows no feed: a loader in a circle of references is taken down in an order that its workers wait seconds for.
    """

    pieces: IndexPieces
    loads: slice
    """The parts of a round that are loaded here."""
    joins: bool
    """Whether they are loaded as one batch."""
    ahead: int
    """Rounds that are dealt out together."""
    current: _Pass | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.current is not None
        return self._walk(self.current)  # bound now: another pass may begin before this one is first asked

    def _walk(self, current: _Pass) -> Iterator[Any]:
        while planned := list(islice(current.rounds, self.ahead)):
            batches: list[Any] = []
            for made in planned:
                parts = [part for part in made.parts[self.loads] if part is not None]
                if len(parts) > 1 and self.joins:
                    parts = [self.pieces.join(parts)]
                if parts:
                    current.handed.append((made.rows, len(parts)))
                    batches += parts
            yield from batches if current.seeds is None else map(SeededBatch, batches, current.seeds)


class IndexFeed:
    """Batches of a loader over a map-style dataset.

    Args:
        source: The user's loader.
        sharding: Who gets what.
        rank: Set where ranks load samples of their own: what is drawn while loading then differs between them. None: it
            is drawn as the unprepared loader draws it.
        all_shards: Load the parts of all shards, for ``whole_rounds``.
    """

    def __init__(self, source: Any, sharding: Sharding, rank: int | None, all_shards: bool = False) -> None:
        batched = source.batch_sampler is not None
        lists = batched or sharding.batch_size is not None
        self.sharding = sharding
        self.order = Order(source.batch_sampler if batched else source.sampler, source.dataset)
        self._pieces = IndexPieces() if lists else KeyPieces()
        self._rank = rank or 0
        # Workers are seeded apart; what this process draws itself comes from generators that all ranks may share.
        self._isolation = Isolation() if rank is not None and source.num_workers == 0 else None
        self._generator = torch.Generator()
        loads, joins = slice(None) if all_shards else sharding.own, lists and not all_shards
        ahead = 1
        if self.order.contained:
            ahead = max(1, min(_ROUNDS_TOGETHER, _SAMPLES_TOGETHER // (sharding.round_size or sharding.data_size)))
        self._plan = _PlanSampler(self._pieces, loads, joins, ahead)
        self._batches_of_a_round = 1 if joins else len(range(sharding.data_size)[loads])
        self._counted: tuple[tuple[int, int], int] | None = None
        self.inner = clone(
            source, **{"batch_sampler" if batched else "sampler": self._plan, "generator": self._generator}
        )
        self._in_workers = source.num_workers > 0
        if self._in_workers:
            self.inner.__dict__.update(
                dataset=SeededDataset(source.dataset), worker_init_fn=SeededStart(source.worker_init_fn)
            )

    def read(self, seed: int, epoch: int, start: int) -> Iterator[Step]:
        """This process's batches, from round ``start`` on."""
        try:
            left = self.count(seed, epoch) - start
        except TypeError:
            for (loaded, rows), following in with_next(self._load(seed, epoch, start)):
                yield _joined(loaded), rows, 1 if following is None else None
            return
        # All in one generator, and no tuple with names: each costs microseconds on every step.
        iterator, handed = self._begin(seed, epoch, start)
        for batch in iterator:
            rows, parts = handed.popleft()
            if parts > 1:
                batch = _joined([batch, *islice(iterator, parts - 1)])
            if left < 1:
                self._warn_of_length("more")
                left = 1
            yield batch, rows, left
            left -= 1
        if left > 0:
            self._warn_of_length("fewer")

    def whole_rounds(self, seed: int, epoch: int, start: int) -> Iterator[Round]:
        """The loaded parts of all shards."""
        for loaded, rows in self._load(seed, epoch, start):
            missing = self.sharding.data_size - len(loaded)
            yield Round([*loaded, *[None] * missing], rows)

    def _load(self, seed: int, epoch: int, start: int) -> Iterator[tuple[list[Any], Rows]]:
        iterator, handed = self._begin(seed, epoch, start)
        for batch in iterator:
            rows, parts = handed.popleft()
            yield [batch, *islice(iterator, parts - 1)], rows

    def _begin(self, seed: int, epoch: int, start: int) -> tuple[Iterator[Any], deque[tuple[Rows, int]]]:
        """Begin a pass. Returns what loads the batches, and ``_Pass.handed`` for them."""
        planned = self._rounds(seed, epoch)
        current = self._plan.current = _Pass(islice(planned, start, None) if start else planned)
        # By position, so that a resumed pass draws what the unbroken one would have.
        seeds = _seeds(seed, epoch, self._rank, start * self._batches_of_a_round)
        if self._in_workers:
            current.seeds = seeds
        self._generator.manual_seed(derive_seed(seed, epoch, "workers", self._rank, start))
        iterator = iter(self.inner)
        if self._isolation is not None and not self._isolation.idle:
            iterator = self._apart(self._isolation, iterator, seeds)
        return iterator, current.handed

    def _apart(self, isolation: Isolation, iterator: Iterator[Any], seeds: Iterator[int]) -> Iterator[Any]:
        """Load with other random numbers than the other ranks, and without drawing from what they share."""
        while not isolation.idle:
            batch = isolation.call(next, iterator, END, seed=next(seeds))
            if batch is END:
                return
            yield batch
        yield from iterator

    def _rounds(self, seed: int, epoch: int) -> Iterator[Round]:
        return self.sharding.rounds(self.order.walk(seed, epoch), self._pieces)

    def count(self, seed: int, epoch: int) -> int:
        """Batches of this process in an epoch.

        Raises:
            TypeError: The sampler has no length.
        """
        counted = self.sharding.count(len(self.order.root), self._samples())
        if counted is not None:
            return counted
        # It depends on the size of the last batch, which only the sampler knows: walk it, once an epoch.
        if self._counted is None or self._counted[0] != (seed, epoch):
            own = self.sharding.own
            made = sum(1 for made in self._rounds(seed, epoch) if any(made.rows.sizes[own]))
            self._counted = (seed, epoch), made
        return self._counted[1]

    @property
    def remainder(self) -> int:
        """Real samples of a last round that is incomplete, 0 if it isn't, -1 if only the round itself can tell."""
        samples, size = self._samples(), self.sharding.round_size
        if self.sharding.drop_last:
            return 0
        return -1 if samples is None or size is None else samples % size

    def _samples(self) -> int | None:
        """Samples that torch's own batch sampler hands out; None for other samplers, which may do anything."""
        root = self.order.root
        if type(root) is not BatchSampler or not hasattr(root.sampler, "__len__"):
            return None
        samples = len(root.sampler)
        return samples - samples % root.batch_size if root.drop_last else samples

    def _warn_of_length(self, how: str) -> None:
        warnings.warn(
            f"{type(self.order.root).__name__} yielded {how} batches than its len() announced, by which gradient "
            f"accumulation finds its last group; correct its __len__",
            stacklevel=3,
        )


def _seeds(seed: int, epoch: int, rank: int, position: int) -> Iterator[int]:
    """What each batch is drawn from, from one position on. It knows no feed, for the reason given at the sampler."""
    for each in itertools.count(position):
        yield derive_seed(seed, epoch, "items", rank, each)


def _joined(loaded: list[Any]) -> Any:
    """Items of several shards as one batch."""
    if len(loaded) == 1:
        return loaded[0]
    return CollatedPieces().join([Collated(leading_rows(item), item) for item in loaded]).data
