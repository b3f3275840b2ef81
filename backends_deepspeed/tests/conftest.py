"""Ranks with the engine in them, for all tests of this member; started once, since importing it takes seconds.

They end with this folder's tests: what many worlds in one process leave behind there keeps a core busy.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drivetrain.requirements import installed_version
from drivetrain.testing.pool import WorkerPool


@pytest.fixture(scope="package")
def ranks() -> Iterator[WorkerPool]:
    """``ranks.run(function, ..., size=2, config=settings(stage))``."""
    if installed_version("deepspeed") is None:
        pytest.skip("the engine is not installed: pip install deepspeed")
    with WorkerPool(3, {"DS_ACCELERATOR": "cpu"}) as pool:
        yield pool
