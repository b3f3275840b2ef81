"""Gradients of a group of micro-batches that was not finished when a checkpoint was saved.

Without them the group's first update after resuming would lack what was accumulated before. They are a rank's own: they
are reduced over the ranks only at the group's end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from drivetrain.checkpoint.optimizer_names import plain_name

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["clear", "collect", "put_back"]

logger = logging.getLogger(__name__)


def _parameters(accelerator: Accelerator) -> dict[str, nn.Parameter]:
    run = accelerator.run
    return {
        f"{index}.{plain_name(name)}": parameter
        for index, model in enumerate(accelerator.known.wrapped_models)
        for name, parameter in run.hooks.unwrap(run=run, model=model).named_parameters()
    }


def collect(accelerator: Accelerator) -> dict[str, Tensor] | None:
    """This rank's gradients by ``<model>.<parameter>``; None where the backend keeps them in pieces of its own."""
    if accelerator.run.capabilities.shards_params:
        logger.warning(
            "saved after %d micro-batches of a group, whose gradients backend %r can't hand out: a run that continues "
            "from this checkpoint starts the group anew. Save when sync_gradients is true",
            accelerator.gate.unfinished,
            accelerator.run.names["backend"],
        )
        return None
    return {name: parameter.grad for name, parameter in _parameters(accelerator).items() if parameter.grad is not None}


def clear(accelerator: Accelerator) -> None:
    """Drop all gradients: those of before have nothing to do with what was loaded."""
    for optimizer in accelerator.known.optimizers:
        accelerator.gradients.zero_grad(optimizer, True)


def put_back(accelerator: Accelerator, saved: Mapping[str, Tensor]) -> None:
    """Go on with what was accumulated."""
    for name, parameter in _parameters(accelerator).items():
        if name in saved:
            parameter.grad = saved[name].to(parameter)
