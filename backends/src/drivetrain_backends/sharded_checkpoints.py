"""``save_state`` and ``load_state`` in pieces: each rank writes what it holds and reads what it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drivetrain.bundle import Bundle
from drivetrain.checkpoint import layout, sharded_files
from drivetrain.checkpoint.agreement import agreed
from drivetrain.checkpoint.optimizer_names import by_name, by_position, plain_name
from drivetrain.checkpoint.sharded_files import ShardedFiles
from drivetrain.errors import CheckpointError
from drivetrain.world import Run
from drivetrain_backends import model_state
from drivetrain_backends.pieces import Piece, survey

__all__ = ["Holding", "in_pieces", "load", "save"]


@attrs.frozen(eq=False)
class Holding:
    """What the ranks of a backend hold of models and optimizers: three functions."""

    locate: Callable[[Tensor], Piece]
    """Gives the piece this rank holds of a parameter or buffer."""
    split: Callable[[Run, Any, Sequence[str]], tuple[dict[str, Any], dict[str, Piece]]]
    """Takes the run, an optimizer and a name for each of its parameters. Gives the optimizer's state dict, the same on
    all ranks, with tokens for the tensors that are in pieces, and the pieces this rank holds."""
    read: Callable[[Any, dict[str, Any], ShardedFiles], None]
    """Loads such a state dict into an optimizer, reading from the open files what this rank holds."""


def in_pieces(bundle: Bundle, directory: Path) -> bool:
    """Whether anything of this bundle is there in pieces."""
    return any(sharded_files.is_sharded(directory / layout.model(index)) for index in range(len(bundle.models))) or any(
        sharded_files.is_sharded(_optimizer(directory, index)) for index in range(len(bundle.optimizers))
    )


def _optimizer(directory: Path, index: int) -> Path:
    return (directory / layout.optimizer(index)).parent


def _optimizer_label(index: int, optimizer: Any) -> str:
    return f"optimizer {index} ({type(optimizer).__name__})"


def save(run: Run, bundle: Bundle, directory: Path, holding: Holding) -> None:
    """Write all models and optimizers. Every rank calls it.

    Raises:
        CheckpointError: On every rank, if one of them failed.
    """
    if not bundle.shared_storage:
        raise CheckpointError(
            "state_dict_type: sharded needs storage that all machines share, since each rank writes a part; leave out "
            "ProjectConfiguration(save_on_each_node=True)"
        )
    for index, model in enumerate(bundle.models):
        if index in bundle.taken_over:
            continue
        module = run.hooks.unwrap(run=run, model=model)
        found = model_state.contents(module, holding.locate)
        others = {
            "aliases": found.aliases,
            "extra": {name: inner.get_extra_state() for name, inner in found.extra.items()},
        }
        where, label = directory / layout.model(index), bundle.model_label(index)
        sharded_files.write(run, where, found.pieces, survey(run, found.pieces), others, f"state of {label}")
    for index, optimizer in enumerate(bundle.optimizers):
        label = _optimizer_label(index, optimizer)
        state, pieces = holding.split(run, optimizer, _labels(bundle, index))
        others = by_name(state, bundle.names[index])
        sharded_files.write(run, _optimizer(directory, index), pieces, survey(run, pieces), others, f"state of {label}")


def _labels(bundle: Bundle, index: int) -> list[str]:
    names = [name for group in bundle.names[index] for name in group]
    return [
        f"unnamed.{number}" if name is None else f"{name[0]}.{plain_name(name[1])}" for number, name in enumerate(names)
    ]


@attrs.frozen(eq=False)
class _Found:
    """Something to be loaded, open and checked."""

    index: int
    files: ShardedFiles
    state: Any


def load(run: Run, bundle: Bundle, directory: Path, strict: bool, holding: Holding) -> None:
    """Read what :func:`save` wrote, on any number of ranks. Every rank calls it.

    Raises:
        CheckpointError: On every rank, if it does not fit on one. What can be checked is checked before anything is
            changed.
    """
    with contextlib.ExitStack() as stack:
        models: list[_Found] = []
        optimizers: list[_Found] = []
        with agreed(run, f"loading {directory}"):
            for index, model in enumerate(bundle.models):
                where = directory / layout.model(index)
                if index not in bundle.taken_over and _there(where, strict):
                    files = stack.enter_context(ShardedFiles.open(where))
                    found = model_state.contents(run.hooks.unwrap(run=run, model=model), holding.locate)
                    _check(files, found, strict, bundle.model_label(index))
                    models.append(_Found(index, files, found))
            for index, optimizer in enumerate(bundle.optimizers):
                where = _optimizer(directory, index)
                if _there(where, strict):
                    files = stack.enter_context(ShardedFiles.open(where))
                    label = _optimizer_label(index, optimizer)
                    state = by_position(files.others, bundle.names[index], optimizer, label)
                    optimizers.append(_Found(index, files, state))
        with agreed(run, f"loading {directory}"):
            for each in models:
                _read_model(each.files, each.state)
            for each in optimizers:
                holding.read(bundle.optimizers[each.index], each.state, each.files)


def _there(where: Path, strict: bool) -> bool:
    if sharded_files.is_sharded(where):
        return True
    if strict:
        raise CheckpointError(f"{where} has nothing in pieces, though other parts of the checkpoint have")
    return False


def _check(files: ShardedFiles, found: model_state.Contents, strict: bool, label: str) -> None:
    aliases, extra = files.others["aliases"], files.others["extra"]
    shapes = model_state.by_all_names(files.layouts, aliases)
    problems = model_state.misfits(found, shapes, set(extra), strict)
    if problems:
        raise CheckpointError(
            f"the weights in {files.directory} do not fit {label}: {model_state.listed(problems)}. Nothing was loaded"
        )


def _read_model(files: ShardedFiles, found: model_state.Contents) -> None:
    aliases = files.others["aliases"]
    for name, piece in found.pieces.items():
        saved: Sequence[str] = [aliases.get(one, one) for one in model_state.names_of(found, name)]
        kept = next((one for one in saved if one in files.layouts), None)
        if kept is not None:
            files.read_into(kept, piece)
    for name, inner in found.extra.items():
        if name in files.others["extra"]:
            inner.set_extra_state(files.others["extra"][name])
