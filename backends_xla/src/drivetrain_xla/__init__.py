"""Backend ``xla``: torch_xla on one device, on many by SPMD, or as replicas that torch_xla starts.

Importing this package is light: torch and the engine are imported in the hooks.
"""

from __future__ import annotations

from drivetrain_xla.backend import Xla
from drivetrain_xla.config import MeshConfig, XlaConfig

__version__ = "0.1.0"

__all__ = ["MeshConfig", "Xla", "XlaConfig", "__version__"]
