"""Processes with the engine in them: one that computes on one device, one that has a mesh of four.

A process can't go back from SPMD, and the runtime reads the number of devices once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drivetrain.testing.pool import WorkerPool
from drivetrain_xla.pairing import mismatch

DEVICES = 4
LIMIT = 120.0
"""Seconds for one task. The first imports the engine, and every new graph is compiled."""


def _started(devices: int) -> Iterator[Callable[..., Any]]:
    wrong = mismatch()
    if wrong is not None:
        pytest.skip(f"{wrong[0]}; make test-xla runs this in an environment that has the pair")
    with WorkerPool(1, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}) as pool:

        def run(function: Callable[..., Any], *args: Any, config: dict[str, Any]) -> Any:
            return pool.run(function, *args, size=1, config=config, timeout=LIMIT)[0]

        yield run


@pytest.fixture(scope="session")
def on_one_device() -> Iterator[Callable[..., Any]]:
    """``on_one_device(function, *args, config=...)``"""
    yield from _started(1)


@pytest.fixture(scope="session")
def on_a_mesh() -> Iterator[Callable[..., Any]]:
    """``on_a_mesh(function, *args, config=...)``: for sections with ``spmd: true``."""
    yield from _started(DEVICES)
