"""From the user's loader to a prepared one: the decisions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.configuration import DataLoaderConfiguration
from drivetrain.data.dispatch import Collectives, DispatchFeed, SlicedRounds
from drivetrain.data.feed import Feed, RoundFeed, clone
from drivetrain.data.indexed import IndexFeed
from drivetrain.data.loader import DataLoaderDispatcher, DataLoaderShard, Gate
from drivetrain.data.order import given_seed, samplers
from drivetrain.data.plan import Sharding
from drivetrain.data.stream import StreamFeed, iterates_itself

__all__ = ["prepare_loader"]


def prepare_loader(
    loader: Any,
    *,
    data_rank: int,
    data_size: int,
    feeds: int = 1,
    place: Callable[[Any], Any] | None,
    configuration: DataLoaderConfiguration,
    gate: Gate | None,
    base_seed: int,
    collectives: Collectives | None,
) -> Any:
    """Make a loader give this process its share of the data.

    Args:
        loader: A ``DataLoader``. A prepared one is returned as it is.
        data_rank: First data shard this process feeds.
        data_size: Data shards of the run.
        feeds: Shards this process feeds: their batches come joined.
        place: Brings a batch to the device; None leaves batches where they are.
        configuration: The settings.
        gate: Told of every batch that is handed out.
        base_seed: What orders are derived from where neither the settings nor the loader have a seed; equal on all
            ranks.
        collectives: Connects the ranks; needed to dispatch.

    Returns:
        A :class:`DataLoaderShard`, or a :class:`DataLoaderDispatcher` where rank 0 reads for all.

    Raises:
        TypeError: It is no ``DataLoader``.
        ValueError: The settings don't fit the loader.
    """
    if isinstance(loader, DataLoaderShard):
        return loader
    if not isinstance(loader, DataLoader):
        raise TypeError(f"only a torch DataLoader can be prepared, not {type(loader).__name__}")
    sharded = _shards_itself(loader, configuration, data_size)
    if data_size == 1 or sharded:
        sharding = _sharding(loader, configuration, 0, 1, 1)
    else:
        sharding = _sharding(loader, configuration, data_rank, data_size, feeds)
        loader = _in_order(loader)
    # One process that feeds all shards has nobody to send anything to.
    dispatch = sharding.feeds < sharding.data_size and _dispatches(loader, configuration)
    feed: Feed
    if dispatch:
        if collectives is None:
            raise ValueError("dispatching a loader's data from rank 0 needs collectives, and this run has none")
        feed = DispatchFeed(_reader(loader, configuration, sharding), collectives, keep_device=place is not None)
    elif _is_stream(loader):
        if sharding.data_size > 1 and iterates_itself(loader):
            warnings.warn(
                f"{type(loader).__name__} has its own way of iterating, which prepare() keeps: every rank loads all "
                f"batches and uses every {data_size}th. dispatch_batches=True would load them on rank 0 only",
                stacklevel=2,
            )
        feed = StreamFeed(loader, sharding, data_rank if sharded and data_size > 1 else None)
    else:
        feed = IndexFeed(loader, sharding, data_rank if data_size > 1 else None)
    kind = DataLoaderDispatcher if dispatch else DataLoaderShard
    return kind(
        loader,
        feed,
        place=place,
        gate=gate,
        seed=_seed(loader, configuration, base_seed, collectives, data_size),
        data_size=data_size,
        trims=data_size == 1 or not sharded,
    )


def _is_stream(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset) or iterates_itself(loader)


def _shards_itself(loader: Any, configuration: DataLoaderConfiguration, data_size: int) -> bool:
    """Whether the loader gives each rank data of its own already.

    Raises:
        ValueError: Its sampler shards for another number of ranks.
    """
    if configuration.already_sharded or getattr(loader.dataset, "drivetrain_sharded", False):
        return True
    for sampler in samplers(loader)[1:]:
        replicas = getattr(sampler, "num_replicas", 1)
        if not isinstance(replicas, int) or replicas == 1:
            continue
        name = type(sampler).__name__
        if replicas != data_size:
            raise ValueError(
                f"the loader's {name} shards the data for {replicas} ranks, but this run has {data_size} data-parallel "
                f"ranks; leave it out, and prepare() shards the data"
            )
        warnings.warn(
            f"the loader's {name} shards the data already, so its shards are used as they are, and metrics keep the "
            f"samples it repeats. Leave it out to let prepare() shard, or say DataLoaderConfiguration("
            f"already_sharded=True) to have it so without this warning",
            stacklevel=3,
        )
        return True
    return False


def _sharding(
    loader: Any, configuration: DataLoaderConfiguration, data_rank: int, data_size: int, feeds: int
) -> Sharding:
    batch_size, root = loader.batch_size, loader.batch_sampler
    if batch_size is None:  # a batch sampler of the user's, or one passed as sampler: its batches are the unit
        root = loader.sampler if root is None else root
        size = getattr(root, "batch_size", None)
        batch_size = size if isinstance(size, int) and size > 0 else None
    split = configuration.split_batches and data_size > 1
    if split and batch_size is None and root is loader.sampler and not _is_stream(loader):
        raise ValueError(
            "split_batches=True can't cut what a loader with batch_size=None loads; let it batch, or use "
            "split_batches=False"
        )
    return Sharding(
        data_size=data_size,
        data_rank=data_rank,
        feeds=feeds,
        batch_size=batch_size,
        split=split,
        even=configuration.even_batches,
        drop_last=bool(loader.drop_last or getattr(root, "drop_last", False)),
    )


def _in_order(loader: Any) -> Any:
    """Ranks that each get batches in an order of their own would not be in the same round."""
    if loader.num_workers == 0 or getattr(loader, "in_order", True):
        return loader
    warnings.warn("in_order=False has no effect on several ranks: their batches must come in step", stacklevel=3)
    return clone(loader, in_order=True)


def _dispatches(loader: Any, configuration: DataLoaderConfiguration) -> bool:
    if configuration.dispatch_batches is not None:
        return configuration.dispatch_batches
    return isinstance(loader.dataset, IterableDataset)


def _reader(loader: Any, configuration: DataLoaderConfiguration, sharding: Sharding) -> RoundFeed:
    """What rank 0 reads from for all ranks."""
    if configuration.slice_fn_for_dispatch is not None:
        return SlicedRounds(StreamFeed(loader, Sharding()), sharding, configuration.slice_fn_for_dispatch)
    if _is_stream(loader):
        return StreamFeed(loader, sharding)
    return IndexFeed(loader, sharding, None, all_shards=True)


def _seed(
    loader: Any,
    configuration: DataLoaderConfiguration,
    base_seed: int,
    collectives: Collectives | None,
    data_size: int,
) -> int:
    if configuration.data_seed is not None:
        return configuration.data_seed
    seed = given_seed(loader)
    if seed is None:
        return base_seed
    if data_size > 1 and collectives is not None:
        # Generators may be seeded by rank; ranks that shuffle in different ways would lose and repeat samples.
        seed = collectives.broadcast_object(seed, 0)
    return seed
