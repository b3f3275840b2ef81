"""Seeds for everything that is drawn while loading, without a trace in the generators the training draws from."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

__all__ = ["Isolation", "derive_seed", "private_generators", "reseeded", "seed_everything", "seed_of"]


def derive_seed(*parts: int | str) -> int:
    """A seed below 2**63 that is a function of all parts, and unlike that of any others."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@attrs.frozen
class _Source:
    """One of the process's global generators."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    seed: Callable[[int], Any]
    same: Callable[[Any, Any], bool]


def _same_numpy_state(one: Any, other: Any) -> bool:
    return bool(one[2] == other[2] and np.array_equal(one[1], other[1]))


_SOURCES = (
    # Not torch.manual_seed: that takes a hundred times as long and seeds devices too.
    _Source(
        torch.get_rng_state, torch.set_rng_state, lambda seed: torch.default_generator.manual_seed(seed), torch.equal
    ),
    _Source(random.getstate, random.setstate, random.seed, lambda one, other: bool(one == other)),
    # Looked up when called: numpy.random takes longer to import than all of this package.
    _Source(
        lambda: np.random.get_state(),
        lambda state: np.random.set_state(state),
        lambda seed: np.random.seed(seed % 2**32),
        _same_numpy_state,
    ),
)


def seed_everything(seed: int) -> None:
    """Seed this process's global generators; not those of devices, which loading has no business with."""
    for source in _SOURCES:
        source.seed(seed)


def private_generators(owner: Any) -> dict[str, Any]:
    """Attributes that are generators of an object's own, but for ``generator``: so torch's samplers call theirs."""
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    return {name: value for name, value in attributes.items() if name != "generator" and _is_generator(value)}


def _is_generator(value: Any) -> bool:
    kind = type(value)  # exactly: what derives from these may draw from somewhere else, as random.SystemRandom does
    if kind.__module__.startswith("numpy.random"):
        return kind in (np.random.Generator, np.random.RandomState)
    return kind in (random.Random, torch.Generator)


def seed_of(generator: Any) -> int:
    """A seed that depends on all of a private generator's state."""
    if isinstance(generator, torch.Generator):
        return int(generator.initial_seed())
    return derive_seed(pickle.dumps(generator).hex())


def reseeded(generator: Any, seed: int) -> Any:
    """A fresh generator of the same kind: the one given may be shared with code that would notice."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed)
    if isinstance(generator, random.Random):
        return random.Random(seed)
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    return np.random.Generator(type(generator.bit_generator)(seed))


class Isolation:
    """Calls foreign code with global generators of its own, and puts the process's back.

    Exchanging all of them for each batch would cost more than many a batch, so the first call shows which are drawn
    from, and later ones exchange only those.

    Args:
        seed: What the generators start from, unless a call gives a seed of its own.
    """

    def __init__(self, seed: int = 0) -> None:
        self._used: Sequence[int] | None = None
        self._seed = seed
        self._states: list[Any] = []

    @property
    def idle(self) -> bool:
        """Whether the first call showed that nothing is drawn, so that there is nothing to keep apart."""
        return self._used is not None and not self._used

    def call(self, function: Callable[..., Any], *args: Any, seed: int | None = None) -> Any:
        """Call ``function`` on generators that go on where the last call left them, or start from ``seed``."""
        if self._used is None:
            return self._first_call(function, args, self._seed if seed is None else seed)
        if self.idle:
            return function(*args)
        sources = [_SOURCES[index] for index in self._used]
        outside = [source.get() for source in sources]
        try:
            for position, source in enumerate(sources):
                if seed is None:
                    source.set(self._states[position])
                else:
                    source.seed(seed)
            return function(*args)
        finally:
            if seed is None:
                self._states = [source.get() for source in sources]
            for source, state in zip(sources, outside, strict=True):
                source.set(state)

    def _first_call(self, function: Callable[..., Any], args: Sequence[Any], seed: int) -> Any:
        outside = [source.get() for source in _SOURCES]
        try:
            for source in _SOURCES:
                source.seed(seed)
            before = [source.get() for source in _SOURCES]
            return function(*args)
        finally:
            after = [source.get() for source in _SOURCES]
            self._used = [
                index for index, source in enumerate(_SOURCES) if not source.same(before[index], after[index])
            ]
            self._states = [after[index] for index in self._used]
            for source, state in zip(_SOURCES, outside, strict=True):
                source.set(state)
