"""The order of an epoch: a function of seed and epoch, equal on all ranks without asking them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain.data.randomness import Isolation, derive_seed, private_generators, reseeded, seed_of

__all__ = ["END", "Order", "given_seed", "samplers"]

# Samplers known to draw from nothing but the generator they have. Anyone else's is run isolated.
_CONTAINED = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
# Iterators over something that is there already: nothing can be drawn after they are made.
_FIXED_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
END: Any = object()
"""Default for ``next``, where None could be an item."""


def samplers(root: Any) -> list[Any]:
    """A sampler and those inside it, the outermost first."""
    found: list[Any] = []
    while root is not None and all(root is not sampler for sampler in found):
        found.append(root)
        inside = getattr(root, "batch_sampler", None)  # compared to None: a sampler's truth may be its length
        root = getattr(root, "sampler", None) if inside is None else inside
    return found


def given_seed(loader: Any) -> int | None:
    """Seed of the generator a loader or its sampler was given; None if it has none."""
    chain = samplers(loader)[1:]
    for owner in [loader, *chain]:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return _seed_of(generator)
    own = [seed_of(generator) for sampler in chain for generator in private_generators(sampler).values()]
    return derive_seed(*own) if own else None


class Order:
    """Walks a sampler, the same way each time it is asked for the same epoch.

    torch's own samplers are walked as copies with a generator seeded for the epoch. Anyone else's runs on generators of
    its own, so that it can draw from torch's, numpy's or Python's global ones without ranks coming apart, and so can it
    from a generator among its attributes, which is seeded for the epoch too; what it makes of that is law.

    Args:
        root: The loader's batch sampler; its sampler, if it doesn't batch.
        dataset: Told the epoch, if it wants to know.
    """

    def __init__(self, root: Any, dataset: Any) -> None:
        self.root = root
        self._chain = samplers(root)
        self.contained = all(type(sampler) in _CONTAINED for sampler in self._chain)
        """Whether nothing outside can tell when the sampler is asked for more."""
        self._told = [part for part in [*self._chain, dataset] if callable(getattr(part, "set_epoch", None))]
        self._set = 0

    def chosen_epoch(self) -> int | None:
        """The epoch someone set on the sampler itself since it was last walked; None if nobody did."""
        for part in self._chain:
            epoch = getattr(part, "epoch", None)
            if hasattr(part, "set_epoch") and isinstance(epoch, int) and epoch != self._set:
                return epoch
        return None

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset the epoch."""
        self._set = epoch
        for part in self._told:
            part.set_epoch(epoch)

    def begin(self, seed: int, epoch: int) -> None:
        """Put samplers and dataset at the start of an epoch."""
        self.set_epoch(epoch)
        for depth, sampler in enumerate(self._chain):
            _reseed(sampler, derive_seed(seed, epoch, "order", depth))
            for name, generator in private_generators(sampler).items():
                sampler.__dict__[name] = reseeded(generator, derive_seed(seed, epoch, "order", depth, name))

    def walk(self, seed: int, epoch: int) -> Iterator[Any]:
        """What the sampler yields in an epoch, lazily."""
        if self.contained:
            self.set_epoch(epoch)
            return iter(_seeded_copy(self.root, seed, epoch))
        self.begin(seed, epoch)
        return _isolated(self.root, derive_seed(seed, epoch, "sampler"))


class _StandIn(torch.Generator):
    """Takes the place of a generator the user gave to a sampler, seeded for one epoch."""

    given: int
    """Seed of the user's, which the orders of all epochs are derived from."""


def _reseed(sampler: Any, seed: int) -> None:
    """Put a sampler that was given a generator at the start of an epoch.

    It gets another one: the user's may be shared with other samplers, which would notice.
    """
    generator = getattr(sampler, "generator", None)
    if not isinstance(generator, torch.Generator):
        return
    fresh = _StandIn(generator.device)
    fresh.given = _seed_of(generator)
    fresh.manual_seed(seed)
    try:
        sampler.generator = fresh
    except AttributeError:  # read-only: its own has to do
        generator.manual_seed(seed)


def _seed_of(generator: torch.Generator) -> int:
    return generator.given if isinstance(generator, _StandIn) else int(generator.initial_seed())


def _seeded_copy(sampler: Any, seed: int, epoch: int, depth: int = 0) -> Any:
    """One of torch's samplers with a generator for an epoch, and the same for the sampler inside it."""
    made = copy(sampler)
    if hasattr(made, "generator"):
        device = "cpu" if made.generator is None else made.generator.device
        made.generator = torch.Generator(device).manual_seed(derive_seed(seed, epoch, "order", depth))
    if hasattr(made, "sampler"):
        made.sampler = _seeded_copy(made.sampler, seed, epoch, depth + 1)
    return made


def _isolated(root: Iterable[Any], seed: int) -> Iterator[Any]:
    isolation = Isolation(seed)
    iterator, item = isolation.call(_start, root)
    fixed = isinstance(iterator, _FIXED_ITERATORS)
    while item is not END:
        yield item
        if fixed or isolation.idle:
            yield from iterator
            return
        item = isolation.call(next, iterator, END)


def _start(root: Iterable[Any]) -> tuple[Iterator[Any], Any]:
    """A sampler's iterator and its first item: generator functions draw nothing before it is asked for."""
    iterator = iter(root)
    return iterator, next(iterator, END)
