"""What a prepared loader reads from: batches of this process, in rounds that all ranks take part in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeAlias

from drivetrain.data.order import END, Order
from drivetrain.data.plan import Round, Sharding
from drivetrain.data.rows import Rows

__all__ = ["Feed", "RoundFeed", "Step", "clone", "with_next"]


Step: TypeAlias = tuple[Any, Rows, int | None]
"""What a process gets in a round: the batch, its rows, and how many batches are left for this process, this one
included. None: not known, except that there are more."""


class Feed(Protocol):
    """Source of a loader's batches."""

    sharding: Sharding
    order: Order

    def read(self, seed: int, epoch: int, start: int) -> Iterator[Step]:
        """This process's batches of an epoch, from round ``start`` on."""

    def count(self, seed: int, epoch: int) -> int:
        """Batches of this process in an epoch. Raises TypeError if that isn't known."""

    @property
    def remainder(self) -> int:
        """Real samples of a last round that is incomplete, 0 if it isn't, -1 if only the round itself can tell."""


class RoundFeed(Feed, Protocol):
    """A feed that can read for all shards, for one process to send to the others."""

    def whole_rounds(self, seed: int, epoch: int, start: int) -> Iterator[Round]:
        """The loaded parts of all shards in each round."""


def clone(loader: Any, **changes: Any) -> Any:
    """A loader of the same class and settings that differs in some, also in those torch lets nobody set.

    The attributes are copied; the constructor, which in a subclass may take anything, isn't called.
    """
    made = object.__new__(type(loader))
    made.__dict__.update(loader.__dict__)
    made.__dict__.update(changes, _iterator=None)  # workers that are kept from epoch to epoch are the original's
    return made


def with_next(items: Iterable[Any]) -> Iterator[tuple[Any, Any | None]]:
    """Each item with the one after it, which is None for the last."""
    iterator = iter(items)
    item = next(iterator, END)
    while item is not END:
        following = next(iterator, END)
        yield item, None if following is END else following
        item = following
