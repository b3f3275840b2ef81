"""What holds for the tests of all members: `worker_pool` gives them real processes."""

import gc
import signal

from hypothesis import settings

pytest_plugins = ["drivetrain.testing.fixtures"]

# How long an example takes depends on what else the machine does, and timing is no test's affair.
settings.register_profile("drivetrain", deadline=None)
settings.load_profile("drivetrain")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in the background. What the tests start would ignore their interrupts, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported until now stays; looking through it takes a quarter of a second in every full collection."""
    gc.freeze()
