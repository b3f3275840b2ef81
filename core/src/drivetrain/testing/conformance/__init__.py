"""The conformance kit: proves that installed plugins keep the contract, on real processes and against plain torch.

``drivetrain conform`` runs it from a shell, :mod:`drivetrain.testing.suite` under pytest. Which checks apply follows
from what a plugin claims: its own ``Capabilities`` and ``Policy``. A claim that is false fails.

Importing this package is light; the checks themselves bring torch.
"""

from __future__ import annotations
