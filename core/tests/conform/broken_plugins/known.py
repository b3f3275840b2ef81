"""With defects that they declare, or say they have."""

from __future__ import annotations

from broken_plugins.right import Right
from broken_plugins.training import NeverSteps

from drivetrain.plugin import Known


class KnowsItsDefect(NeverSteps):
    """Is wrong, and says so."""

    api = (1, 0)
    known = (Known("losses and weights are those of one process on the whole batch", "the engine is on holiday"),)


class KnowsTooMuch(Right):
    """Was wrong once."""

    api = (1, 0)
    known = (Known("losses and weights are those of one process on the whole batch", "the engine was on holiday"),)


class KnowsWithBf16(Right):
    """Says that it is wrong with another precision."""

    api = (1, 0)
    known = (Known("losses and weights are those of one process on the whole batch", "coarse", precision="bf16"),)
