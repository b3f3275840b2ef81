"""Backends ``fsdp`` and ``fsdp1``: parameters, gradients and optimizer state cut over all processes.

Importing this package is light: torch is imported in the hooks.
"""

from __future__ import annotations

from drivetrain_fsdp.backend import Fsdp, Fsdp1
from drivetrain_fsdp.config import Fsdp1Config, FsdpConfig, MixedPrecision1Config, MixedPrecisionConfig
from drivetrain_fsdp.handlers import FullyShardedDataParallelPlugin

__version__ = "0.1.0"

__all__ = [
    "Fsdp",
    "Fsdp1",
    "Fsdp1Config",
    "FsdpConfig",
    "FullyShardedDataParallelPlugin",
    "MixedPrecision1Config",
    "MixedPrecisionConfig",
    "__version__",
]
