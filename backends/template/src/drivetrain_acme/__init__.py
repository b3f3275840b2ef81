"""Device ``acme`` for Drivetrain.

Importing this package is light: torch, and Acme's own package, are imported when a run needs the device.
"""

from __future__ import annotations

from drivetrain_acme.device import Acme, AcmeConfig

__version__ = "0.1.0"

__all__ = ["Acme", "AcmeConfig", "__version__"]
