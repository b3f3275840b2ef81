"""Keeping one model the same on all ranks: found out when it differs, made equal when it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.errors import CollectiveMismatchError, DrivetrainError
from drivetrain.world import Run

__all__ = ["check_same_model", "copy_from_first_rank"]


def check_same_model(run: Run, model: nn.Module) -> None:
    """Raise the same error on every rank if parameters or buffers differ between ranks in name, shape, dtype or use.

    Without it the ranks would wait for each other in collectives of different sizes. Costs one small collective.

    Raises:
        CollectiveMismatchError: They differ; the text names the first difference and the ranks.
        DrivetrainError: A parameter has no shape yet.
    """
    mine = _describe(model)
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(run.hooks.all_gather_object(run=run, value=digest, group=None))) == 1:
        return
    everyone: list[list[str]] = run.hooks.all_gather_object(run=run, value=mine, group=None)
    rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    raise CollectiveMismatchError(
        f"the {type(model).__name__} given to prepare is not the same model on all ranks: "
        f"{_first_difference(everyone[0], everyone[rank], rank)}. Build it with the same arguments on every rank"
    )


def _describe(model: nn.Module) -> list[str]:
    lines = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise DrivetrainError(
                f"parameter {name!r} of {type(model).__name__} has no shape yet; run one batch through the model "
                f"before prepare"
            )
        use = "trainable" if parameter.requires_grad else "frozen"
        lines.append(f"{use} parameter {name!r}, {_kind(parameter)}")
    lines += [f"buffer {name!r}, {_kind(buffer)}" for name, buffer in model.named_buffers() if not is_lazy(buffer)]
    return lines


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _first_difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    for index in range(max(len(first), len(other))):
        ours = first[index] if index < len(first) else "nothing more"
        theirs = other[index] if index < len(other) else "nothing more"
        if ours != theirs:
            return f"rank 0 has {ours}, where rank {rank} has {theirs}"
    return f"rank 0 and rank {rank} have them in another order"


def copy_from_first_rank(run: Run, model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(run.hooks.broadcast(run=run, tensor=tensor, source=0, group=None))
