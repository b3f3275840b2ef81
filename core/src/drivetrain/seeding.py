"""Seeding every generator a training script may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["set_seed"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on this process, its device included.

    Args:
        seed: Any whole number that numpy accepts: 0 to 2**32 - 1.
        device_specific: Add the rank, so that every process draws other numbers.
        deterministic: Also make torch use deterministic algorithms, or raise where there is none.

    Raises:
        ValueError: The seed is negative or too large for numpy.
    """
    from drivetrain import state
    from drivetrain.world import Topology

    runtime = state.current()
    if device_specific:
        seed += Topology.from_environment().rank if runtime is None else runtime.run.world.rank
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1; got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if runtime is not None:
        runtime.run.hooks.seed(run=runtime.run, seed=seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
