"""Every installed backend keeps the contract: the conformance kit, as a plugin's own tests would run it."""

from __future__ import annotations

import pytest

from drivetrain import discovery, registry
from drivetrain.errors import EngineError
from drivetrain.testing.suite import *  # noqa: F403
from drivetrain.testing.suite import Suite

# Some checks launch processes that bring torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# With another precision only what depends on it.
OF_PRECISION = ("world", "numerics")

SUITES = [
    suite
    for name in sorted(discovery.entries()["backend"])
    for suite in (Suite(backend=name), Suite(backend=name, precision="bf16", groups=OF_PRECISION))
]


@pytest.fixture(scope="module", params=SUITES, ids=str)
def drivetrain_plugin(request: pytest.FixtureRequest) -> Suite:
    """What is examined."""
    suite: Suite = request.param
    try:
        registry.load(registry.find("backend", suite.backend))
    except EngineError as error:
        pytest.skip(str(error))
    return suite
