"""Bringing a model's values to the device, module by module, so that no device ever holds all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.errors import DrivetrainError
from drivetrain.logging import get_logger
from drivetrain.world import Run
from drivetrain_backends.pieces import plain

__all__ = ["bring", "building", "check_values", "widen"]

logger = get_logger("drivetrain.fsdp")


def building(run: Run, on_first_rank_only: bool) -> contextlib.AbstractContextManager[Any]:
    """Context in which a model is built: as written, or without values on all ranks but the first."""
    if on_first_rank_only and run.world.rank != 0:
        return torch.device("meta")
    return contextlib.nullcontext()


def check_values(run: Run, model: nn.Module, sync: bool) -> None:
    """Make sure that every value the model has is there, or comes from rank 0.

    Raises:
        DrivetrainError: It isn't; the same on all ranks.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = next((name for name, tensor in tensors if tensor.is_meta), None)
    missing = run.hooks.all_gather_object(run=run, value=mine, group=None)
    lacking = [rank for rank, name in enumerate(missing) if name is not None]
    if not lacking or (sync and lacking[0] != 0):
        return
    first = missing[lacking[0]]
    raise DrivetrainError(
        f"{type(model).__name__} has no values for {first!r} on rank {lacking[0]}: it is on the meta device. "
        + (
            "Build it with values on rank 0 (accelerator.init_context() does), from where the others get theirs"
            if lacking[0] == 0
            else "Build it with values on every rank, or set sync_module_states: true to get them from rank 0"
        )
    )


def bring(run: Run, modules: Iterable[nn.Module], sync: bool) -> None:
    """Put the tensors that belong directly to these modules on the run's device.

    Args:
        run: The run.
        modules: Those with parameters or buffers in common together. Ties stay.
        sync: Whether values are those of rank 0. Tensors without values get them so. Every rank must do the same then.
    """
    brought: dict[int, Tensor] = {}
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in brought:
                    brought[id(tensor)] = _brought(run, tensor, sync)
                tensors[name] = brought[id(tensor)]


@torch.no_grad()  # type: ignore[untyped-decorator]
def _brought(run: Run, tensor: Tensor, sync: bool) -> Tensor:
    device = run.world.device
    if tensor.is_meta:
        value = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    else:
        value = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter) and not value.is_contiguous():
            value = value.contiguous()
    if sync:
        held = plain(value)
        held.copy_(run.hooks.broadcast(run=run, tensor=held, source=0, group=None))
    if not tensor.is_meta and plain(value).data_ptr() == plain(tensor).data_ptr():
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    for name, attribute in tensor.__dict__.items():  # the user's own; a wrapper's inner tensors are there, and moved
        parameter.__dict__.setdefault(name, attribute)
    return parameter


def widen(model: nn.Module) -> None:
    """Make trainable parameters of less than 32 bits float32: small updates would be lost in them."""
    narrow = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.is_floating_point()
        and parameter.dtype.itemsize < 4
        and not is_traceable_wrapper_subclass(parameter)
    ]
    for _, parameter in narrow:
        parameter.data = parameter.data.float()
    if narrow:
        logger.warning(
            "%s has %d trainable parameters below 32 bits (%s, ...), which are kept in float32 under mixed precision",
            type(model).__name__,
            len(narrow),
            narrow[0][0],
        )
