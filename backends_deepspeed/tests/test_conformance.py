"""The conformance kit at every stage, with worker processes of its own for each."""

from __future__ import annotations

import pytest

from drivetrain.requirements import installed_version
from drivetrain.testing.suite import *  # noqa: F403
from drivetrain.testing.suite import Suite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(installed_version("deepspeed") is None, reason="the engine is not installed"),
]


def suite(stage: int, precision: str, *groups: str) -> Suite:
    section = {"zero_stage": stage, **({"param_persistence_threshold": 0} if stage == 3 else {})}
    return Suite(
        backend="deepspeed",
        device="cpu",
        precision=precision,
        sizes=(2,),
        settings={"deepspeed": section},
        groups=groups or None,
    )


# Launching is the same at every stage, and the tests of all backends examine it at the one that is the default.
OF_A_STAGE = ("world", "numerics", "wiring", "state", "precision")
SUITES = [
    suite(3, "no", *OF_A_STAGE),
    suite(3, "bf16", "world", "numerics"),
    *(pytest.param(suite(stage, "no", *OF_A_STAGE), marks=pytest.mark.nightly) for stage in (0, 1)),
    pytest.param(suite(1, "bf16", "world", "numerics"), marks=pytest.mark.nightly),
]


@pytest.fixture(
    scope="module", params=SUITES, ids=lambda one: f"{one.precision}-{one.settings['deepspeed']['zero_stage']}"
)
def drivetrain_plugin(request: pytest.FixtureRequest) -> Suite:
    """What is examined."""
    found: Suite = request.param
    return found
