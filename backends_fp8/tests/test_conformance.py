"""The conformance kit on pairs of this member's precision and each backend, and on a pair that must be refused."""

from __future__ import annotations

import pytest

from drivetrain.testing.suite import *  # noqa: F403
from drivetrain.testing.suite import Suite

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'drivetrain-fp8[torchao]'")

# The kit starts processes of its own, and some of its checks launch more.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PRECISION = "fp8-torchao"
# Gathering in 8 bits is for backends that let parameters say how they are gathered. This one replicates them.
REFUSED = Suite(backend="ddp", device="cpu", settings={PRECISION: {"float8_all_gather": True}}, groups=("precision",))

# The backend that lets parameters say how they are gathered has the most that can go wrong.
OTHERS = (
    *(Suite(backend=name, device="cpu", precision=PRECISION) for name in ("single", "ddp")),
    Suite(backend="fsdp1", device="cpu", precision=PRECISION, groups=("world", "numerics")),
)
SUITES = [
    Suite(backend="fsdp", device="cpu", precision=PRECISION),
    *(pytest.param(suite, marks=pytest.mark.nightly) for suite in OTHERS),
    REFUSED,
]


@pytest.fixture(scope="module", params=SUITES, ids=str)
def drivetrain_plugin(request: pytest.FixtureRequest) -> Suite:
    """What is examined."""
    suite: Suite = request.param
    return suite
