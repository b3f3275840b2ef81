"""Imports torch where it should not."""

from __future__ import annotations

import torch  # noqa: F401
from broken_plugins import fails

from drivetrain.plugin import Backend


@fails("the entry module imports neither", "imports torch")
class Heavy(Backend):
    """Costs seconds to be listed."""

    api = (1, 0)
