"""Fixtures for pytest; opt in with ``pytest_plugins = ["drivetrain.testing.fixtures"]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drivetrain.testing.pool import WorkerPool

__all__ = ["Ranks", "worker_pool"]

MOST_RANKS = 4


class Ranks:
    """A world of a fixed size in the session's pool."""

    def __init__(self, pool: WorkerPool, size: int) -> None:
        self._pool = pool
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As :meth:`WorkerPool.run`."""
        return self._pool.run(function, *args, size=self.size, **options)


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[Callable[[int], Ranks]]:
    """``worker_pool(2).run(function)`` runs it on two ranks; all sizes up to 4 share the same processes."""
    with WorkerPool(MOST_RANKS) as pool:
        yield lambda size: Ranks(pool, size)
