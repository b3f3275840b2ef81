"""Backend ``deepspeed``: ZeRO stages 0-3, with offload to host memory or NVMe.

Importing this package is light: torch and the engine are imported in the hooks.
"""

from __future__ import annotations

from drivetrain_deepspeed.backend import DeepSpeed
from drivetrain_deepspeed.config import DeepSpeedConfig, OffloadConfig
from drivetrain_deepspeed.handlers import DeepSpeedPlugin

__version__ = "0.1.0"

__all__ = ["DeepSpeed", "DeepSpeedConfig", "DeepSpeedPlugin", "OffloadConfig", "__version__"]
