"""Ranks with the engine in them, for all tests of this member; started once, since importing it takes seconds.

They end with this folder's tests: what many worlds in one process leave behind there keeps a core busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.requirements import installed_version
from drivetrain.testing.pool import WorkerPool

HERE = Path(__file__).parent
_started: list[WorkerPool] = []


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """``ranks.run(function, ..., size=2, config=settings(stage))``."""
    if installed_version("deepspeed") is None:
        pytest.skip("the engine is not installed: pip install deepspeed")
    with WorkerPool(3, {"DS_ACCELERATOR": "cpu"}) as pool:
        _started.append(pool)
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the engine out of the developer's loop: it trains in a few seconds, but takes many to come up."""
    for item in items:
        if HERE in item.path.parents and "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after the last test of this folder.

    pytest ends a fixture with a folder only where that folder is a package, and two packages named ``tests`` can't be
    collected in one run.
    """
    if nextitem is None or HERE not in nextitem.path.parents:
        while _started:
            _started.pop().close()
