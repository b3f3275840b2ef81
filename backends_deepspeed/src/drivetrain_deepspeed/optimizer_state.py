"""The state of an optimizer that works on the engine's flat tensors, by parameter: made whole, put back, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.checkpoint.sharded_files import TOKEN
from drivetrain.errors import CheckpointError
from drivetrain.world import Run
from drivetrain_backends.pieces import Piece, gather, survey
from drivetrain_deepspeed import partitions
from drivetrain_deepspeed.partitions import Slot

__all__ = ["full", "load", "read", "split", "take_over", "whole"]


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _basic(zero: Any) -> Any:
    return getattr(zero, "optimizer", zero)


def _slots(zero: Any, optimizer: Optimizer) -> list[Slot | None]:
    return [partitions.slot(zero, parameter) for parameter in _parameters(optimizer)]


def split(run: Run, zero: Any, optimizer: Optimizer, labels: Sequence[str]) -> tuple[dict[str, Any], dict[str, Piece]]:
    """The state dict of the user's optimizer with tokens for tensors in pieces, and the pieces this rank holds.

    Every rank calls it, and gets the same state dict.

    Args:
        run: The run.
        zero: The optimizer of the engine.
        optimizer: The user's, with the user's parameters.
        labels: A name for each parameter, in the order of the groups.
    """
    pieces: dict[str, Piece] = {}
    own: dict[int, dict[str, Any]] = {}
    for number, (found, label) in enumerate(zip(_slots(zero, optimizer), labels, strict=True)):
        state = {} if found is None else _basic(zero).state.get(found.flat, {})
        if found is None or not state or not found.numel:
            continue
        own[number] = {}
        for key, value in state.items():
            if _is_flat(found, value):
                pieces[f"{label}.{key}"] = Piece(found.cut(value), found.start, found.shape)
                own[number][key] = {TOKEN: f"{label}.{key}"}
            else:
                own[number][key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    merged: dict[int, dict[str, Any]] = {}
    # A rank that holds nothing of a parameter has no state of it.
    for theirs in run.hooks.all_gather_object(run=run, value=own, group=None):
        for number, entries in theirs.items():
            merged.setdefault(number, entries)
    return {"state": dict(sorted(merged.items())), "param_groups": _groups(optimizer)}, pieces


def _is_flat(found: Slot, value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == found.flat.numel() and value.dim() > 0


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of the groups, their parameters numbered in order."""
    found, first = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        found.append({**group, "params": list(range(first, first + count))})
        first += count
    return found


def full(run: Run, zero: Any, optimizer: Optimizer) -> dict[str, Any]:
    """The whole state dict on rank 0, on the CPU; without state on other ranks. Every rank calls it."""
    state, pieces = split(run, zero, optimizer, [str(number) for number in range(len(_parameters(optimizer)))])
    wholes = dict(gather(run, pieces, survey(run, pieces)))
    if run.world.rank != 0:
        return {**state, "state": {}}
    return {**state, "state": _resolved(state["state"], lambda number, name: wholes[name])}


def _resolved(state: Mapping[int, Any], resolve: Callable[[int, str], Any]) -> dict[int, dict[str, Any]]:
    return {
        number: {
            key: resolve(number, value[TOKEN]) if isinstance(value, dict) and TOKEN in value else value
            for key, value in entries.items()
        }
        for number, entries in state.items()
    }


def load(zero: Any, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole state dict; this rank's parts alone are kept."""

    def fill(number: int, key: str, piece: Piece, value: Any) -> None:
        piece.write(value.detach().reshape(-1)[piece.start : piece.stop], piece.start)

    _load(zero, optimizer, state, fill, lambda found, value: tuple(getattr(value, "shape", ())) == found.shape)


def read(zero: Any, optimizer: Optimizer, state: Mapping[str, Any], files: Any) -> None:
    """Load what :func:`split` returned, reading from open files what this rank holds.

    Raises:
        CheckpointError: A tensor has another shape than its parameter.
    """

    def fill(number: int, key: str, piece: Piece, value: Any) -> None:
        name = value[TOKEN]
        if files.layouts[name].shape != piece.shape:
            raise CheckpointError(
                f"{files.directory}: {name} is of shape {files.layouts[name].shape}, and its parameter of {piece.shape}"
            )
        files.read_into(name, piece)

    _load(zero, optimizer, state, fill, lambda found, value: isinstance(value, dict) and TOKEN in value)


def whole(state: Mapping[str, Any], files: Any) -> dict[str, Any]:
    """What :func:`split` returned with every tensor whole, read from open files."""

    def resolve(number: int, name: str) -> Tensor:
        layout = files.layouts[name]
        made = torch.empty(layout.shape, dtype=layout.dtype)
        files.read_into(name, Piece(made, 0, layout.shape))
        return made

    return {**state, "state": _resolved(state["state"], resolve)}


@torch.no_grad()  # type: ignore[untyped-decorator]
def _load(
    zero: Any,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    fill: Callable[[int, str, Piece, Any], None],
    is_piece: Callable[[Slot, Any], bool],
) -> None:
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    for number, found in enumerate(_slots(zero, optimizer)):
        entries = state["state"].get(number, {})
        if found is None or not found.numel:
            continue
        held = _basic(zero).state[found.flat]
        for key, value in entries.items():
            if not is_piece(found, value):
                held[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            if not isinstance(held.get(key), Tensor) or held[key].numel() != found.flat.numel():
                held[key] = torch.zeros_like(found.flat, requires_grad=False)
            fill(number, key, Piece(found.cut(held[key]), found.start, found.shape), value)


def take_over(zero: Any, optimizer: Optimizer) -> None:
    """Cut the state that an optimizer had before it was prepared."""
    numbers = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
    state = {numbers[id(parameter)]: entries for parameter, entries in optimizer.state.items()}
    load(zero, optimizer, {"state": state, "param_groups": _groups(optimizer)})
    optimizer.state.clear()
