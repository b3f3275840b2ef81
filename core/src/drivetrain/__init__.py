"""Drivetrain: one PyTorch training loop, unchanged on any device and under any distribution strategy.

Importing this package is cheap: every public name is resolved when it is first used, and torch is imported no earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator as Accelerator
    from drivetrain.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
    from drivetrain.checkpoint import ProjectConfiguration as ProjectConfiguration
    from drivetrain.data.configuration import DataLoaderConfiguration as DataLoaderConfiguration
    from drivetrain.data.skipping import skip_first_batches as skip_first_batches
    from drivetrain.distributed_type import DistributedType as DistributedType
    from drivetrain.handlers import AutocastKwargs as AutocastKwargs
    from drivetrain.handlers import GradScalerKwargs as GradScalerKwargs
    from drivetrain.launch import debug_launcher as debug_launcher
    from drivetrain.launch import notebook_launcher as notebook_launcher
    from drivetrain.local_sgd import LocalSGD as LocalSGD
    from drivetrain.logging import get_logger as get_logger
    from drivetrain.memory import find_executable_batch_size as find_executable_batch_size
    from drivetrain.plugin import API as API
    from drivetrain.profiling import ProfileKwargs as ProfileKwargs
    from drivetrain.seeding import set_seed as set_seed
    from drivetrain.seeding import synchronize_rng_states as synchronize_rng_states
    from drivetrain.state import AcceleratorState as AcceleratorState
    from drivetrain.state import GradientState as GradientState
    from drivetrain.state import PartialState as PartialState
    from drivetrain.tracking import GeneralTracker as GeneralTracker

# Where each public name lives. Names that plugins export are found through their metadata, see `__getattr__`.
_PUBLIC = {
    "API": "drivetrain.plugin",
    "Accelerator": "drivetrain.accelerator",
    "AcceleratorState": "drivetrain.state",
    "AutocastKwargs": "drivetrain.handlers",
    "DataLoaderConfiguration": "drivetrain.data.configuration",
    "DistributedType": "drivetrain.distributed_type",
    "GeneralTracker": "drivetrain.tracking",
    "GradScalerKwargs": "drivetrain.handlers",
    "GradientAccumulationPlugin": "drivetrain.accumulation",
    "GradientState": "drivetrain.state",
    "LocalSGD": "drivetrain.local_sgd",
    "PartialState": "drivetrain.state",
    "ProfileKwargs": "drivetrain.profiling",
    "ProjectConfiguration": "drivetrain.checkpoint",
    "debug_launcher": "drivetrain.launch",
    "find_executable_batch_size": "drivetrain.memory",
    "get_logger": "drivetrain.logging",
    "notebook_launcher": "drivetrain.launch",
    "set_seed": "drivetrain.seeding",
    "skip_first_batches": "drivetrain.data.skipping",
    "synchronize_rng_states": "drivetrain.seeding",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from importlib.util import find_spec

    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif name.startswith("_") or find_spec(f"{__name__}.{name}") is not None:
        # `from drivetrain import registry` asks here first; the import system loads the module once we say no.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        value = import_module("drivetrain.registry").exported(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
