"""Who gets which samples: pure arithmetic on batches, the same for index lists and for loaded data.

A *round* is what all ranks get at the same time. Without ``split`` it is as many batches of the loader as there are
data shards, batch k going to shard ``k % data_size``; with it, one batch cut into equal parts. An incomplete round at
the end is completed by going on from the first samples of the epoch, dropped, or handed out as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol

import attrs

from drivetrain.data.rows import Rows

__all__ = ["IndexPieces", "KeyPieces", "Pieces", "Round", "Sharding"]


class Pieces(Protocol):
    """What the plan needs to know about a kind of batches."""

    def rows(self, batch: Any) -> int:
        """Samples in a batch."""

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Some of a batch's samples."""

    def join(self, batches: Sequence[Any]) -> Any:
        """One batch with the samples of several."""

    def fill(self, batch: Any | None, extra: Sequence[Any], count: int) -> Any:
        """A batch with ``count`` more samples: those of ``extra``. None stands for a batch of no samples."""


class IndexPieces:
    """Batches as a batch sampler makes them: sequences of indices."""

    rows = staticmethod(len)

    def take(self, batch: Any, start: int, stop: int) -> Any:
        return batch[start:stop]

    def join(self, batches: Sequence[Any]) -> Any:
        return batches[0] if len(batches) == 1 else [index for batch in batches for index in batch]

    def fill(self, batch: Any | None, extra: Sequence[Any], count: int) -> Any:
        return self.join([*([] if batch is None else [batch]), *extra])


class KeyPieces(IndexPieces):
    """Keys of a loader that doesn't batch: each is whole, whatever it looks like, and counts as one."""

    rows = staticmethod(lambda batch: 1)


class Round(NamedTuple):
    """What each data shard gets at the same time. A part is None where a shard gets nothing."""

    parts: Sequence[Any]
    rows: Rows


@attrs.frozen(kw_only=True)
class Sharding:
    """How batches are shared out.

    Attributes:
        data_size: Data shards of the run.
        data_rank: First shard this process feeds.
        feeds: Shards this process feeds.
        batch_size: Samples of a full batch; None if batches have sizes of their own and are never completed, only
            repeated as wholes.
        split: Cut each batch into ``data_size`` parts, instead of handing out batches in turn.
        even: Complete the last round.
        drop_last: Drop the last round if it lacks batches.

    Raises:
        ValueError: The batch size can't be cut into ``data_size`` equal parts.
    """

    data_size: int = 1
    data_rank: int = 0
    feeds: int = 1
    batch_size: int | None = None
    split: bool = False
    even: bool = True
    drop_last: bool = False

    def __attrs_post_init__(self) -> None:
        if self.split and self.batch_size is not None and self.batch_size % self.data_size:
            raise ValueError(
                f"split_batches=True cuts each batch into equal parts, but a batch size of {self.batch_size} can't be "
                f"divided by {self.data_size} data-parallel ranks; use a multiple of {self.data_size}"
            )

    @property
    def own(self) -> slice:
        """The parts of a round that are this process's."""
        return slice(self.data_rank, self.data_rank + self.feeds)

    @property
    def batches_per_round(self) -> int:
        """Batches of the loader that make a round."""
        return 1 if self.split else self.data_size

    @property
    def round_size(self) -> int | None:
        """Samples of a full round over all ranks; None if it varies."""
        return None if self.batch_size is None else self.batch_size * self.batches_per_round

    @property
    def own_batch_size(self) -> int | None:
        """Samples of a full batch of this process; None if it varies."""
        return None if self.round_size is None else self.round_size * self.feeds // self.data_size

    def rows_of(self, real: Sequence[int], sizes: Sequence[int]) -> Rows:
        """The rows of a round, as this process sees them."""
        return Rows(tuple(real), tuple(sizes), sum(sizes[self.own]))

    def rounds(self, batches: Iterable[Any], pieces: Pieces) -> Iterator[Round]:
        """Deal batches out.

        Args:
            batches: The loader's batches, in order. Read one round at a time.
            pieces: What kind of batches they are.
        """
        iterator, wanted = iter(batches), self.batches_per_round
        head: list[Any] = []  # the first round, which incomplete ones are completed from
        last: Rows | None = None
        while group := list(islice(iterator, wanted)):
            head = head or group
            if not self.split and last is not None and tuple(map(pieces.rows, group)) == last.real == last.sizes:
                yield Round(group, last)  # like the one before: nothing to work out
                continue
            made = self._cut(group[0], head, pieces) if self.split else self._deal(group, head, pieces)
            if made is not None:
                last = made.rows
                yield made

    def _deal(self, group: list[Any], head: list[Any], pieces: Pieces) -> Round | None:
        real = [pieces.rows(batch) for batch in group]
        missing = self.data_size - len(group)
        short = self.even and self.data_size > 1 and self.batch_size is not None and min(real) < self.batch_size
        if not missing and not short:
            return Round(group, self.rows_of(real, real))
        if missing and self.drop_last:
            return None
        if not self.even:
            real += [0] * missing
            return Round([*group, *[None] * missing], self.rows_of(real, real))
        if self.batch_size is None:
            parts = [*group, *(head[slot % len(head)] for slot in range(missing))]
        else:
            parts = self._complete([*group, *[None] * missing], head, pieces)
        sizes = [pieces.rows(part) for part in parts]
        return Round(parts, self.rows_of([*real, *[0] * missing], sizes))

    def _complete(self, group: list[Any], head: list[Any], pieces: Pieces) -> list[Any]:
        """Bring every batch to the full size with the first samples of the epoch, each batch going on from the last."""
        assert self.batch_size is not None
        parts, cursor = [], 0
        for batch in group:
            lacking = self.batch_size - (0 if batch is None else pieces.rows(batch))
            if lacking > 0:
                batch = pieces.fill(batch, _cycle(head, cursor, lacking, pieces), lacking)
                cursor += lacking
            parts.append(batch)
        return parts

    def _cut(self, batch: Any, head: list[Any], pieces: Pieces) -> Round:
        real = pieces.rows(batch)
        full = self.batch_size or 0
        if real > full:  # batches of sizes of their own: the smallest parts that hold all
            full = -(-real // self.data_size) * self.data_size
        if self.even and self.data_size > 1 and real < full:
            batch = pieces.fill(batch, _cycle(head, 0, full - real, pieces), full - real)
        share = full // self.data_size
        total = pieces.rows(batch)
        starts = [min(shard * share, total) for shard in range(self.data_size + 1)]
        sizes = [stop - start for start, stop in pairwise(starts)]
        reals = [min(max(real - start, 0), size) for start, size in zip(starts, sizes, strict=False)]
        parts = [
            pieces.take(batch, start, start + size) if size else None
            for start, size in zip(starts, sizes, strict=False)
        ]
        return Round(parts, self.rows_of(reals, sizes))

    def count(self, batches: int, samples: int | None) -> int | None:
        """Rounds in which this process gets something.

        Args:
            batches: Batches of the loader.
            samples: Samples in them; None if not known.

        Returns:
            None if that depends on the samples, and they are not known.
        """
        if self.split:
            if self.even or self.data_size == 1:
                return batches
            if self.batch_size is None or samples is None:
                return None
            tail = samples - (batches - 1) * self.batch_size
            return batches if tail > self.data_rank * (self.batch_size // self.data_size) else batches - 1
        whole, rest = divmod(batches, self.data_size)
        if not rest or self.drop_last:
            return whole
        return whole + (self.even or self.data_rank < rest)


def _cycle(head: list[Any], cursor: int, count: int, pieces: Pieces) -> list[Any]:
    """``count`` samples from the first round on from sample ``cursor``, from its start again where it ends."""
    sizes = [pieces.rows(batch) for batch in head]
    if not any(sizes):
        return []
    cursor %= sum(sizes)
    taken = []
    while count > 0:
        for batch, size in zip(head, sizes, strict=True):
            if cursor >= size:
                cursor -= size
                continue
            stop = min(size, cursor + count)
            taken.append(pieces.take(batch, cursor, stop))
            count -= stop - cursor
            cursor = 0
            if count == 0:
                break
    return taken
