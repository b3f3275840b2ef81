"""The ground that every torch.distributed backend stands on: process group, collectives, equal replicas.

Importing this package is light: torch is imported in the hooks, when a run needs it.
"""

from __future__ import annotations

from drivetrain_backends.handlers import InitProcessGroupKwargs
from drivetrain_backends.torch_distributed import TorchDistributedBackend

__version__ = "0.1.0"

__all__ = ["InitProcessGroupKwargs", "TorchDistributedBackend", "__version__"]
