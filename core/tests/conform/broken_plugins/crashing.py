"""A module that can't be imported in a fresh process, though it was in that of the tests."""

from __future__ import annotations

import sys

from broken_plugins import fails

from drivetrain.plugin import Backend

if not hasattr(sys, "conformance_test"):
    raise ImportError("libvendor.so: cannot open shared object file")


@fails("the entry module imports neither", "libvendor.so")
class Crashing(Backend):
    """Works on one machine."""

    api = (1, 0)
