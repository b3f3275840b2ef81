"""The loaders that ``prepare`` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
from torch.utils.data import DataLoader

from drivetrain.data.feed import Feed
from drivetrain.data.full_batches import FullBatches
from drivetrain.data.progress import Progress
from drivetrain.data.rows import Rows

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "Gate"]


class Gate(Protocol):
    """Who is told that a loader is being iterated; gradient accumulation is."""

    def enter(self, loader: Any) -> Any:
        """An iteration starts. Returns what identifies it."""

    def advance(self, frame: Any, left: int | None) -> None:
        """A batch is about to be handed out. ``left`` counts it and those after it; None: unknown, but not the last."""

    def leave(self, frame: Any) -> None:
        """The iteration ended, or was broken off."""


@attrs.define(eq=False)
class _Now:
    """What the user has in hands. An object of its own, since setting a loader's attributes is slow."""

    rows: Rows | None = None
    ending: bool = False
    full_batches: FullBatches = attrs.field(factory=FullBatches)


class DataLoaderShard(DataLoader):
    """A prepared loader: this process's share of the user's loader, placed on its device.

    Everything a ``DataLoader`` has and this class doesn't is the user's loader's. Iterating gives the same batches for
    the same seed and epoch; the epoch moves on by itself after each pass.

    Args:
        source: The user's loader.
        feed: Reads the batches.
        place: Brings a batch to the device; None leaves it where it is.
        gate: Told of every batch; None: nobody is.
        seed: What the order is derived from.
        data_size: Data shards of the run, whether or not the feed shards.
        trims: Whether the rows of all ranks are known, so that metrics can leave out repeated ones.
    """

    # DataLoader's own __init__ is not called: this is a view of one loader, read through another.
    def __init__(
        self,
        source: Any,
        feed: Feed,
        *,
        place: Callable[[Any], Any] | None,
        gate: Gate | None,
        seed: int,
        data_size: int,
        trims: bool,
    ) -> None:
        self._source = source
        self._feed = feed
        self._place = place
        self._gate = gate
        self._progress = Progress(seed)
        self._data_size = data_size
        self._trims = trims
        self._skip: int | None = None
        self._origin: DataLoaderShard | None = None
        self._now = _Now()

    def __iter__(self) -> Iterator[Any]:
        progress, place, now = self._progress, self._place, self._now
        chosen = self._feed.order.chosen_epoch()
        if chosen is not None:
            progress.set_epoch(chosen)
        epoch, start = progress.begin(self._skip)
        given, last = 0, False
        frame = self._gate.enter(self) if self._gate is not None else None
        advance = self._gate.advance if self._gate is not None else None
        try:
            for batch, rows, left in self._feed.read(progress.seed, epoch, start):
                if place is not None:
                    batch = place(batch)
                given += 1
                last = left == 1
                now.rows, now.ending = rows, last
                progress.position, progress.at_end = start + given, last
                if advance is not None:
                    advance(frame, left)
                yield batch
            last = True
        finally:
            now.ending = False
            if progress.end(epoch, given, last):
                self._skip = None
            if self._gate is not None:
                self._gate.leave(frame)

    def __len__(self) -> int:
        """Batches of a whole pass; what is left out by ``skip_first_batches`` is not counted in the pass it concerns.

        Raises:
            TypeError: The data has no length.
        """
        count = self._feed.count(self._progress.seed, self._progress.epoch)
        return max(count - (self._skip or 0), 0)

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # an object that is being built has nothing to look at yet
            raise AttributeError(name)
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        of_torch = isinstance(getattr(DataLoader, name, None), property)
        if not name.startswith("_") and (of_torch or name in vars(self._source)):
            raise ValueError(f"{name} of a prepared loader can't be changed; set it on the loader before preparing it")
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------------------------ what it gives

    @property
    def batch_size(self) -> int | None:
        """Samples of this process in a full batch; None if batches vary in size."""
        return self._feed.sharding.own_batch_size

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks in a full round; None if batches vary in size."""
        size = self._feed.sharding.round_size
        return None if size is None else size * (self._data_size // self._feed.sharding.data_size)

    @property
    def batch_sampler(self) -> Any:
        """The user's batch sampler, over the whole data."""
        return self._source.batch_sampler

    @property
    def sampler(self) -> Any:
        """The user's sampler, over the whole data."""
        return self._source.sampler

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch, and an incomplete last round, is left out."""
        return self._feed.sharding.drop_last

    @property
    def rows(self) -> Rows | None:
        """The rows of the batch given last; None before the first, and where other ranks' data isn't known."""
        return self._now.rows if self._trims else None

    @property
    def full_batches(self) -> FullBatches:
        """What metrics had for full batches."""
        return self._now.full_batches

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch is in the user's hands."""
        return self._now.ending

    @property
    def remainder(self) -> int:
        """Real samples of all ranks' last round if it is incomplete, 0 if it isn't, -1 if that isn't known yet."""
        if not self._trims:
            return -1
        known = self._feed.remainder
        if known < 0 and self._now.ending and self._now.rows is not None:
            return 0 if self._now.rows.complete else self._now.rows.total
        return known

    # ------------------------------------------------------------------------------------------------- where it stands

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next if there is none."""
        return self._progress.epoch

    @property
    def iteration(self) -> int:
        """The same as ``epoch``."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; samplers and datasets that take one are told."""
        self._progress.set_epoch(epoch)
        self._feed.order.set_epoch(self._progress.epoch)

    @property
    def left_at(self) -> int | None:
        """How many batches a loop had when it left an epoch early; None if none did, or another has begun since."""
        return self._progress.position if self._progress.broken_off else None

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position as plain values. The position counts batches the user has, not those read ahead.

        Of an epoch that a loop left early it is the place where that was: whoever loads the state is given the rest
        first, since nobody can know here whether the epoch was over, and half of it may never be seen otherwise. The
        next loop in this process begins the next epoch, as with any loader. To begin that in both,
        ``set_epoch(epoch + 1)`` before; to go on in both, ``skip_first_batches(loader, loader.left_at)`` here.
        """
        return self._progress.state_dict(*self._round())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader was: the next pass gives the rest of its epoch.

        Raises:
            ValueError: This is no state of a loader, or of one with other data, or its position can't be had with this
                number of ranks.
        """
        self._progress.load_state_dict(state, *self._round(), self._count)
        self._skip = None

    def _count(self, seed: int, epoch: int) -> int | None:
        try:
            return self._feed.count(seed, epoch)
        except TypeError:
            return None

    @contextlib.contextmanager
    def evening(self, even: bool) -> Iterator[None]:
        """Context whose passes complete their last round, or don't, whatever the configuration says.

        It has no effect on data that is not sharded here, nor where a slice function cuts the rounds.
        """
        before = self._feed.sharding
        self._feed.sharding = attrs.evolve(before, even=even)
        try:
            yield
        finally:
            self._feed.sharding = before

    def _round(self) -> tuple[int, str]:
        """What all ranks together are given with each batch."""
        total = self.total_batch_size
        if total is not None:
            return total, "samples"
        return (1 if self._feed.sharding.split else self._data_size), "batches"

    @property
    def origin(self) -> DataLoaderShard:
        """The loader ``prepare`` made, of which this may be a copy that skips batches."""
        found: DataLoaderShard | None = self._origin
        return self if found is None else found

    def skipping(self, batches: int) -> DataLoaderShard:
        """A copy whose next pass leaves out the epoch's first batches. Both count the same epochs."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._now = _Now()
        made._skip = batches
        made._origin = self.origin
        self._progress.move(0)  # the copy starts where it is told to, and the original at an epoch's start
        return made


class DataLoaderDispatcher(DataLoaderShard):
    """A prepared loader whose data rank 0 reads for all ranks."""
