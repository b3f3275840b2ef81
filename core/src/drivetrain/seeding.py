"""Seeding every generator a training script may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]


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


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Give several random number generators of every process the state of the main process's.

    Args:
        rng_types: As in :func:`synchronize_rng_state`.
        generator: What ``"generator"`` means.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: str, generator: torch.Generator | None = None) -> None:
    """Give a random number generator of every process the state of the main process's. Every process must call it.

    Args:
        rng_type: ``"torch"``: torch's generator on the CPU. ``"generator"``: the one given. Else the type of the run's
            device: the generators of that.
        generator: What ``"generator"`` means; must be given for it.

    Raises:
        ValueError: There is no such generator in this run.
    """
    from drivetrain import state

    run = state.ensure().run
    if rng_type == "torch":
        torch.set_rng_state(_of_main_process(run, torch.get_rng_state()))
    elif rng_type == "generator":
        if generator is None:
            raise ValueError("rng_type 'generator' needs the generator: synchronize_rng_state('generator', generator)")
        generator.set_state(_of_main_process(run, generator.get_state()))
    elif rng_type == run.world.device.type:
        mine = run.hooks.rng_state(run=run)
        theirs = run.hooks.broadcast_object(run=run, value=mine, source=0, group=None)
        run.hooks.set_rng_state(run=run, state=theirs)
    else:
        raise ValueError(
            f"rng_type {rng_type!r} is no generator of this run; there are: torch, generator, {run.world.device.type}"
        )


def _of_main_process(run: Run, state: torch.Tensor) -> torch.Tensor:
    """A generator's state, which is bytes on the CPU."""
    sent = run.hooks.broadcast(run=run, tensor=state.to(run.world.device), source=0, group=None)
    return sent.cpu()
