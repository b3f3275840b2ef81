"""The conformance kit, on one device and on a mesh of four."""

from __future__ import annotations

import pytest

from drivetrain.testing.suite import *  # noqa: F403
from drivetrain.testing.suite import Suite
from drivetrain_xla.pairing import mismatch

# Every check compiles graphs of its own.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(mismatch() is not None, reason="make test-xla has an environment with the pair"),
]

ONE = {"xla": {"runtime": "CPU", "cpu_devices": 1}}
MESH = {"xla": {"runtime": "CPU", "cpu_devices": 4, "spmd": True, "mesh": {"fsdp": 2}}}
SUITES = [Suite(backend="xla", settings=ONE), Suite(backend="xla", settings=MESH, groups=("numerics", "data", "state"))]


@pytest.fixture(scope="module", params=SUITES, ids=["one device", "mesh"])
def drivetrain_plugin(request: pytest.FixtureRequest) -> Suite:
    """What is examined."""
    suite: Suite = request.param
    return suite
