"""The state of an optimizer whose parameters are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.checkpoint.sharded_files import TOKEN
from drivetrain.errors import CheckpointError
from drivetrain.world import Run
from drivetrain_backends.pieces import Piece, gather, piece_of, survey
from drivetrain_backends.sharded_checkpoints import Holding

__all__ = ["cut", "full", "holding", "load", "read_pieces", "split"]

Locate = Callable[[Tensor], Piece]


def holding(locate: Locate) -> Holding:
    """What the ranks hold, for checkpoints in pieces."""
    return Holding(
        locate,
        lambda run, optimizer, labels: split(run, optimizer, locate, labels),
        lambda optimizer, state, files: read_pieces(optimizer, locate, state, files),
    )


def split(
    run: Run, optimizer: Optimizer, locate: Locate, labels: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Piece]]:
    """An optimizer's state dict with tokens for the tensors that are in pieces, and the pieces this rank holds.

    Every rank calls it, and gets the same state dict.

    Args:
        run: The run.
        optimizer: torch's.
        locate: Gives the piece this rank holds of a parameter.
        labels: A name for each parameter, in the order of the groups.

    Raises:
        CheckpointError: A parameter's state is neither like the parameter nor a number.
    """
    pieces: dict[str, Piece] = {}
    own: dict[int, dict[str, Any]] = {}
    for number, (parameter, label) in enumerate(zip(_parameters(optimizer), labels, strict=True)):
        if parameter not in optimizer.state:
            continue
        own[number] = {}
        for key, value in optimizer.state[parameter].items():
            piece = _piece(parameter, value, locate)
            if piece is not None:
                pieces[f"{label}.{key}"] = piece
                own[number][key] = {TOKEN: f"{label}.{key}"}
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {label} of shape "
                    f"{locate(parameter).shape}; only state shaped like its parameter can be kept in pieces"
                )
            else:
                own[number][key] = value.detach().cpu() if isinstance(value, Tensor) else value
    merged: dict[int, dict[str, Any]] = {}
    # A rank that holds nothing of a parameter may have no state for it.
    for theirs in run.hooks.all_gather_object(run=run, value=own, group=None):
        for number, entries in theirs.items():
            merged[number] = {**entries, **merged.get(number, {})}
    return {**_without_state(optimizer), "state": dict(sorted(merged.items()))}, pieces


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _without_state(optimizer: Optimizer) -> dict[str, Any]:
    """Groups and whatever else an optimizer keeps in its state dict, parameters numbered in order."""
    return {name: value for name, value in optimizer.state_dict().items() if name != "state"}


def _piece(parameter: Tensor, value: Any, locate: Locate) -> Piece | None:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    held = locate(parameter)
    if isinstance(value, DTensor):
        piece = piece_of(value)
        return piece if piece.shape == held.shape else None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Piece(value, held.start, held.shape) if value.shape == local.shape else None


def full(run: Run, optimizer: Optimizer, locate: Locate, group: Any) -> dict[str, Any]:
    """The whole state dict on rank 0, on the CPU; without state on other ranks. Every rank calls it."""
    labels = [str(number) for number in range(len(_parameters(optimizer)))]
    state, pieces = split(run, optimizer, locate, labels)
    wholes = dict(gather(run, pieces, survey(run, pieces), group))
    if run.world.rank != 0:
        return {**state, "state": {}}
    return {**state, "state": _replaced(state["state"], lambda number, name: wholes[name])}


def _replaced(state: Mapping[int, Any], resolve: Callable[[int, str], Any]) -> dict[int, dict[str, Any]]:
    return {
        number: {
            key: resolve(number, value[TOKEN]) if isinstance(value, dict) and TOKEN in value else value
            for key, value in entries.items()
        }
        for number, entries in state.items()
    }


def _like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor for state of a parameter, cut in the same way.

    Zeros, as optimizers make their state themselves: ``empty_like`` of a weight that knows how it is gathered would be
    another such weight.
    """
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def cut(parameter: Tensor, value: Any, locate: Locate) -> Any:
    """This rank's part of a whole state tensor; other values as they are."""
    held = locate(parameter)
    if not isinstance(value, Tensor) or value.dim() == 0 or tuple(value.shape) != held.shape:
        return value
    made = _like(parameter, value.dtype)
    piece = _piece(parameter, made, locate)
    assert piece is not None
    piece.write(value.detach().reshape(-1)[piece.start : piece.stop], piece.start)
    return made


def load(optimizer: Optimizer, locate: Locate, state: Mapping[str, Any]) -> None:
    """Load a whole state dict; this rank's parts alone are kept."""
    parameters = _parameters(optimizer)
    own = {
        number: {key: cut(parameters[number], value, locate) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": own})


def read_pieces(optimizer: Optimizer, locate: Locate, state: Mapping[str, Any], files: Any) -> None:
    """Load a state dict with tokens, reading from files what this rank holds.

    Args:
        optimizer: torch's.
        locate: Gives the piece this rank holds of a parameter.
        state: As :func:`split` returned it, its parameters numbered as this optimizer's.
        files: Open ``ShardedFiles`` with the tensors.

    Raises:
        CheckpointError: A tensor has another shape than the parameter.
    """
    parameters = _parameters(optimizer)

    def read(number: int, name: str) -> Tensor:
        parameter, layout = parameters[number], files.layouts[name]
        if layout.shape != locate(parameter).shape:
            raise CheckpointError(
                f"{files.directory}: {name} is of shape {layout.shape}, and its parameter of {locate(parameter).shape}"
            )
        made = _like(parameter, layout.dtype)
        piece = _piece(parameter, made, locate)
        assert piece is not None
        files.read_into(name, piece)
        return made

    optimizer.load_state_dict({**state, "state": _replaced(state["state"], read)})
