"""The optimizer the engine steps: the user's own by another name, or the engine's in its place."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from typing import Any

import attrs
import torch
from torch.optim import Optimizer

from drivetrain.errors import DrivetrainError

__all__ = ["Trained", "inner_optimizer", "takes_engines_own"]

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Trained:
    """What is kept of an engine that trains a model."""

    face: Optimizer
    """The user's optimizer, with the user's parameters in its groups: what ``prepare`` returns."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]]
    """Each group of ``face`` and the engine's group of the same settings. Empty where both are one optimizer."""
    groups: int
    """Number of groups of ``face``."""
    parameters: frozenset[int]
    """Ids of the model's parameters."""
    dtypes: dict[str, torch.dtype]
    """Dtypes of parameters and buffers before the engine cast them, by name."""
    frozen: dict[int, Any] = attrs.field(factory=dict)
    """What this rank keeps of parameters that are not trained and were rounded, by their ids."""
    pending: bool = False
    """Whether a backward left gradients that no update has used."""
    complete: bool = False
    """Whether these are reduced."""
    hooks: list[Any] = attrs.field(factory=list)
    """On the parameters, as long as the engine is in use."""

    def hand_over(self) -> None:
        """Give the engine the learning rates and other settings that the user sees."""
        if len(self.face.param_groups) != self.groups:
            raise DrivetrainError(
                f"{type(self.face).__name__} has {len(self.face.param_groups)} parameter groups, and had {self.groups} "
                f"when it was prepared; the engine can't take more in, so add groups before prepare"
            )
        for own, engines in self.pairs:
            engines.update((key, value) for key, value in own.items() if key != "params")

    def take_over(self) -> None:
        """Show the user the settings of an optimizer that the engine made."""
        for own, engines in self.pairs:
            own.update((key, value) for key, value in engines.items() if key != "params")


def inner_optimizer(optimizer: Optimizer, offloaded: bool) -> Optimizer:
    """An optimizer for the engine, which puts flat tensors into its groups.

    The user's keeps the user's parameters, so that it can be looked at, clipped with and saved by their names.

    Args:
        optimizer: The user's.
        offloaded: Whether it will work in host memory, where the engine has a faster one of some kinds.
    """
    groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    if offloaded:
        made = _in_host_memory(optimizer, groups)
        if made is not None:
            return made
    copied: Optimizer = object.__new__(type(optimizer))
    # A schedule wraps `step` on the instance, to see whether it was called: that one is the user's.
    copied.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    copied.param_groups, copied.state = groups, defaultdict(dict)
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict):  # hooks: what is registered on one later is not for the other
            setattr(copied, name, OrderedDict(value))
    return copied


def takes_engines_own(optimizer: Optimizer) -> bool:
    """Whether the engine has an optimizer for host memory that does the same as this one."""
    groups = optimizer.param_groups
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return not any(group.get("amsgrad") or group.get("maximize") for group in groups)
    if type(optimizer) is torch.optim.Adagrad:
        return not any(
            group.get("lr_decay") or group.get("initial_accumulator_value") or group.get("maximize") for group in groups
        )
    return False


def _in_host_memory(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer | None:
    name = type(optimizer).__name__
    if not takes_engines_own(optimizer):
        logger.info("%s works in host memory as it is: the engine has no faster one that does the same", name)
        return None
    if isinstance(optimizer, torch.optim.Adagrad):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        made: Optimizer = DeepSpeedCPUAdagrad(groups)
        return made
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made = DeepSpeedCPUAdam(groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW))
    return made
