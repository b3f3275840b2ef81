"""The plugin keeps Drivetrain's contract: every check of the kit is a test here."""

import pytest

from drivetrain.testing.suite import *  # noqa: F403
from drivetrain.testing.suite import Suite

# Bringing up processes takes longer than a test usually may.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=["single", "ddp", "fsdp"])
def drivetrain_plugin(request):
    """The device alone, and under each backend that users will combine it with."""
    return Suite(backend=request.param, device="acme")
