"""Reading on rank 0 for all: each round is sent, and every process keeps its part.

A round costs two broadcasts: a pickled header with the structure and whatever is no tensor, and the bytes of all
tensors. No rank is left waiting: what goes wrong on rank 0 is sent in place of the header and raised everywhere, and
the header of the last round says that it is the last, so that nobody asks for another.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from drivetrain.data.collated import Collated, concatenate, join_rows, leading_rows
from drivetrain.data.feed import RoundFeed, Step, with_next
from drivetrain.data.order import Order
from drivetrain.data.plan import Round, Sharding
from drivetrain.data.stream import StreamFeed
from drivetrain.errors import DrivetrainError, add_note
from drivetrain.nested import map_leaves, map_tensors

__all__ = ["Collectives", "DispatchFeed", "SlicedRounds"]

_SOURCE = 0


class Collectives(Protocol):
    """What dispatching needs of the run's collectives.

    Attributes:
        rank: This process.
        size: Number of processes.
        device: Where tensors must be to be sent.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The source rank's picklable object on every rank."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The source rank's tensor on every rank; the others pass one of its shape and dtype."""


@attrs.frozen
class _Slot:
    """Stands in a part's structure for a tensor, whose data is among the bytes that follow."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class _Header:
    """What rank 0 says about a round."""

    parts: Sequence[Any] = ()
    """Each shard's part with slots for tensors, None where it gets nothing."""
    real: Sequence[int] = ()
    sizes: Sequence[int] = ()
    following: Sequence[int] | None = None
    """Sizes of the next round; None: there is none."""
    bytes: int = 0
    error: BaseException | None = None


class DispatchFeed:
    """Batches that rank 0 reads and sends.

    Args:
        source: Reads for all shards. Asked on rank 0 only, except for the count.
        collectives: Connects the ranks.
        keep_device: Leave the batch where it was received, because something will place it; else it goes to the CPU.
    """

    def __init__(self, source: RoundFeed, collectives: Collectives, keep_device: bool) -> None:
        self.order: Order = source.order
        self._source = source
        self._collectives = collectives
        self._keep_device = keep_device

    @property
    def sharding(self) -> Sharding:
        """Who gets what; that of the source."""
        return self._source.sharding

    @sharding.setter
    def sharding(self, value: Sharding) -> None:
        self._source.sharding = value

    def read(self, seed: int, epoch: int, start: int) -> Iterator[Step]:
        """This process's batches, from round ``start`` on."""
        rounds = None
        if self._collectives.rank == _SOURCE:
            rounds = with_next(self._source.whole_rounds(seed, epoch, start))
        own = self.sharding.own
        left = self._left(seed, epoch, start)
        following: Sequence[int] | None = (1,)
        while following is not None:
            header, buffer = self._exchange(rounds)
            following = header.following
            parts = [self._unpack(part, buffer) for part in header.parts[own] if part is not None]
            if parts:
                last = following is None or not any(following[own])
                rows = self.sharding.rows_of(header.real, header.sizes)
                yield _joined(parts), rows, 1 if last else left and max(left, 2)
                left = left and left - 1

    def _left(self, seed: int, epoch: int, start: int) -> int | None:
        if isinstance(self._source, StreamFeed):
            return None  # a stream's length is what its dataset believes
        try:
            return self.count(seed, epoch) - start
        except TypeError:
            return None

    def _exchange(self, rounds: Iterator[tuple[Round, Round | None]] | None) -> tuple[_Header, Tensor | None]:
        payload = buffer = failure = None
        if rounds is not None:
            try:
                made, following = next(rounds, (None, None))
                payload, buffer = _pack(made, following, self._collectives.device)
            except Exception as error:
                failure = error
                payload = pickle.dumps(_Header(error=_portable(error)))
        header: _Header = pickle.loads(self._collectives.broadcast_object(payload, _SOURCE))
        if failure is not None:
            raise failure
        if header.error is not None:
            add_note(header.error, f"raised on rank {_SOURCE}, which reads this loader's data for all ranks")
            raise header.error
        if not header.bytes:
            return header, None
        if buffer is None:
            buffer = torch.empty(header.bytes, dtype=torch.uint8, device=self._collectives.device)
        return header, self._collectives.broadcast(buffer, _SOURCE)

    def _unpack(self, part: Any, buffer: Tensor | None) -> Any:
        def restore(leaf: Any) -> Any:
            if not isinstance(leaf, _Slot):
                return leaf
            if buffer is None:  # a round of empty tensors sends no bytes
                return torch.empty(leaf.shape, dtype=leaf.dtype)
            stop = leaf.start + _bytes(leaf.shape, leaf.dtype)
            # Copied, or the whole round stays in memory; and its numbers need not lie on word boundaries.
            data = buffer[leaf.start : stop].clone().view(leaf.dtype).view(leaf.shape)
            return data if self._keep_device else data.cpu()

        return map_leaves(restore, part, lambda leaf: isinstance(leaf, _Slot))

    def count(self, seed: int, epoch: int) -> int:
        """Batches of this process in an epoch. Raises TypeError if that isn't known."""
        return self._source.count(seed, epoch)

    @property
    def remainder(self) -> int:
        """Real samples of an incomplete last round, as the source knows it."""
        return self._source.remainder


class SlicedRounds:
    """Rounds of a loader whose batches only the user's function can cut.

    Args:
        source: Reads the loader's batches.
        sharding: Who gets what; nothing is completed.
        slice_fn: ``f(data, slice, process_index=..., num_processes=...)`` makes a shard's part of a round.
    """

    def __init__(self, source: StreamFeed, sharding: Sharding, slice_fn: Callable[..., Any]) -> None:
        self.sharding = attrs.evolve(sharding, even=False)
        self.order = source.order
        self._source = source
        self._slice_fn = slice_fn

    def whole_rounds(self, seed: int, epoch: int, start: int) -> Iterator[Round]:
        """The parts of all shards, cut by the user's function."""
        batches = self._source.batches(seed, epoch)
        shards, position = self.sharding.data_size, 0
        while group := list(islice(batches, self.sharding.batches_per_round)):
            position += 1
            if position <= start or (len(group) < self.sharding.batches_per_round and self.sharding.drop_last):
                continue
            data = concatenate(group)
            rows = leading_rows(data)
            bounds = [shard * rows // shards for shard in range(shards + 1)]
            parts = [
                self._slice_fn(data, slice(bounds[shard], bounds[shard + 1]), process_index=shard, num_processes=shards)
                for shard in range(shards)
            ]
            # How many rows each part has is the function's secret: equal, real sizes make metrics keep all.
            yield Round(parts, self.sharding.rows_of([1] * shards, [1] * shards))

    def read(self, seed: int, epoch: int, start: int) -> Iterator[Step]:
        """Not for one process alone."""
        raise NotImplementedError

    def count(self, seed: int, epoch: int) -> int:
        """Rounds of the loader, each of which has a part for every shard."""
        rounds, rest = divmod(self._source.count(seed, epoch), self.sharding.batches_per_round)
        return rounds + (rest > 0 and not self.sharding.drop_last)

    @property
    def remainder(self) -> int:
        """Nothing is completed."""
        return 0


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * int(dtype.itemsize)


def _pack(made: Round | None, following: Round | None, device: torch.device) -> tuple[bytes, Tensor | None]:
    """A round as a pickled header and the bytes of its tensors."""
    if made is None:
        return pickle.dumps(_Header()), None
    buffers: list[Tensor] = []
    end = 0

    def strip(tensor: Tensor) -> Any:
        nonlocal end
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor  # goes with the header
        slot = _Slot(end, tuple(tensor.shape), tensor.dtype)
        data = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
        buffers.append(data)
        end += len(data)
        return slot

    parts = [None if part is None else map_tensors(strip, part) for part in made.parts]
    sizes = None if following is None else following.rows.sizes
    header = _Header(parts, made.rows.real, made.rows.sizes, sizes, end)
    return pickle.dumps(header), torch.cat(buffers) if end else None


def _portable(error: Exception) -> BaseException:
    """The error itself if it survives being sent, else one that says what it was."""
    try:
        survives = type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # exceptions may hold anything, and fail in any way when they are pickled
        survives = False
    return error if survives else DrivetrainError(f"{type(error).__name__}: {error}")


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else join_rows([Collated(leading_rows(part), part) for part in parts])
