"""The state of every random number generator of a process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drivetrain.data.randomness import derive_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from drivetrain.world import Run

__all__ = ["capture", "restore", "seed_new_rank"]


def capture(run: Run) -> dict[str, Any]:
    """States of Python's, numpy's and torch's global generators and the device's, without drawing from any."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": run.hooks.rng_state(run=run),
    }


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Put back what ``capture`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    run.hooks.set_rng_state(run=run, state=state["device"])


def seed_new_rank(run: Run, state: Mapping[str, Any]) -> None:
    """Seed a rank the saved run did not have: a function of another rank's state and of its own number.

    Args:
        run: The run.
        state: What ``capture`` returned on a rank there was, the same for all new ranks.
    """
    from drivetrain.seeding import set_seed

    known = state["torch"].numpy().tobytes().hex()
    set_seed(derive_seed(known, run.world.rank) % 2**32)
