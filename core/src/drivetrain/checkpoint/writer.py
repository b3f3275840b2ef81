"""Writing a checkpoint: who writes what, in which order, and what happens if it fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import __version__
from drivetrain.checkpoint import layout, rng
from drivetrain.checkpoint.agreement import agreed
from drivetrain.checkpoint.atomic import Replacement, new_token
from drivetrain.checkpoint.bundles import full_weights, leads
from drivetrain.checkpoint.files import FileRecord, checksum, force_to_disk, journal
from drivetrain.checkpoint.gradients import collect
from drivetrain.checkpoint.layout import Manifest, Thing
from drivetrain.checkpoint.tensors import write_tensors
from drivetrain.checkpoint.tree import write_tree
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.world import Run

__all__ = ["save_checkpoint", "things"]

logger = logging.getLogger(__name__)


def save_checkpoint(accelerator: Accelerator, target: Path, iteration: int | None = None) -> None:
    """Save the whole state of a run. Every rank must call it.

    Args:
        accelerator: Knows what was prepared and registered.
        target: Absolute path of the checkpoint. What is there is replaced.
        iteration: Number of an automatically named checkpoint.

    Raises:
        CheckpointError: On every rank, if it failed on one. ``target`` is then as it was.
    """
    run = accelerator.run
    shared = not accelerator.project_configuration.save_on_each_node
    lead = leads(run, shared)
    token = run.hooks.broadcast_object(run=run, value=new_token(), source=0, group=None)
    place = Replacement(target, token)
    try:
        with agreed(run, f"saving to {target}"):
            if lead:
                place.begin(layout.TOP_NAMES)
        with agreed(run, f"saving to {target}"):
            _check_visible(place.partial)
        with journal() as records:
            taken_over = _write_models(accelerator, place.partial, shared)
            _write_the_rest(accelerator, place.partial, lead)
        files = _seal(run, place.partial, records, shared)
        with agreed(run, f"saving to {target}"):
            if lead:
                _manifest(accelerator, files, taken_over, iteration).write(place.partial)
        with agreed(run, f"putting {target} in place"):
            if lead:
                place.commit()
    except BaseException:
        if lead:
            place.discard()
        raise


def _check_visible(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial.parent} is not the same directory on all machines; save to storage they share, or set "
            f"ProjectConfiguration(save_on_each_node=True)"
        )


# ---------------------------------------------------------------------------------------------- models and optimizers


def _write_models(accelerator: Accelerator, directory: Path, shared: bool) -> frozenset[int]:
    """Models and optimizers; returns the models that hooks of the user's saved themselves."""
    run = accelerator.run
    bundle = accelerator.known.bundle()
    bundle.shared_storage = shared
    bundle.taken_over = _run_hooks(accelerator, directory)
    with agreed(run, f"hook 'save_state' of {run.hooks.owner('save_state') or 'core'}"):
        run.hooks.save_state(run=run, bundle=bundle, directory=directory)
    return bundle.taken_over


def _run_hooks(accelerator: Accelerator, directory: Path) -> frozenset[int]:
    """Call the user's hooks; returns which models they saved themselves: those whose weights they took out."""
    hooks = accelerator.save_state_pre_hooks
    if not hooks:
        return frozenset()
    run = accelerator.run
    models = list(accelerator.known.wrapped_models)
    states = [full_weights(run, model) for model in models]
    left = list(states)
    with agreed(run, "a save_state pre-hook"):
        for hook in hooks:
            hook(models, left, str(directory))
    remaining = {id(state) for state in left}
    taken = [index for index, state in enumerate(states) if id(state) not in remaining]
    # Hooks often take weights out on the main process alone.
    return frozenset(run.hooks.broadcast_object(run=run, value=taken, source=0, group=None))


# -------------------------------------------------------------------------------------------------- everything else


def _write_the_rest(accelerator: Accelerator, directory: Path, lead: bool) -> None:
    run = accelerator.run
    custom: list[Any] = []
    with agreed(run, "asking registered objects for their state"):
        custom += [thing.state_dict() for thing in accelerator.registered]  # on every rank: it may communicate
    with agreed(run, "saving the state of the run"):
        if accelerator.scaler is not None:
            accelerator.gradients.update_scale()
        _write_own_part(accelerator, directory)
        if lead:
            _write_common_part(accelerator, directory, custom)


def _write_own_part(accelerator: Accelerator, directory: Path) -> None:
    """What each rank has for itself."""
    run, rank = accelerator.run, accelerator.run.world.rank
    for index, loader in enumerate(accelerator.known.loaders):
        write_tree(directory / layout.loader(index, rank), _loader_state(loader), f"state of loader {index}")
    write_tree(directory / layout.rng(rank), rng.capture(run), "the state of the random number generators")
    learnt = run.hooks.precision_state(run=run, models=accelerator.known.wrapped_models)
    if learnt:
        write_tree(directory / layout.precision(rank), learnt, f"the state of precision {run.names['precision']!r}")
    if accelerator.gate.unfinished:
        gradients = collect(accelerator)
        if gradients is not None:
            write_tensors(directory / layout.gradients(rank), gradients)


def _write_common_part(accelerator: Accelerator, directory: Path, custom: Sequence[Any]) -> None:
    for index, scheduler in enumerate(accelerator.known.schedulers):
        owner = f"state of scheduler {index} ({type(scheduler.scheduler).__name__})"
        write_tree(directory / layout.scheduler(index), scheduler.state_dict(), owner)
    for index, state in enumerate(custom):
        owner = f"state of registered object {index} ({type(accelerator.registered[index]).__name__})"
        write_tree(directory / layout.custom(index), state, owner)
    if accelerator.scaler is not None:
        write_tree(directory / layout.SCALER, accelerator.scaler.state_dict(), "state of the gradient scaler")
    write_tree(directory / layout.ACCUMULATION, accumulation_state(accelerator), "state of gradient accumulation")


def accumulation_state(accelerator: Accelerator) -> dict[str, Any]:
    """Where the groups of micro-batches stand, and what the optimizers know of it."""
    known = accelerator.known
    groups = accelerator.gate.state_dict(known.wrapped_models, known.loaders)
    if any(None in block["models"] for block in groups["blocks"]):
        logger.warning(
            "accumulate(...) was given a model that was not prepared, so where its micro-batches stand is not in the "
            "checkpoint; give it what prepare returned"
        )
    return {
        "groups": groups,
        "optimizers": [
            {"held": optimizer.held, "step_was_skipped": optimizer.step_was_skipped, "finished": optimizer.finished}
            for optimizer in known.optimizers
        ],
    }


def _loader_state(loader: Any) -> Any:
    state_dict = getattr(loader, "state_dict", None)
    if state_dict is None:
        logger.warning("%s has no state_dict, so its position is not in the checkpoint", type(loader).__name__)
        return None
    return state_dict()


# ----------------------------------------------------------------------------------------------------- the manifest


def _seal(run: Run, directory: Path, records: Mapping[Path, FileRecord], shared: bool) -> dict[str, FileRecord]:
    """Size and checksum of every file, all of them on the disk. Ranks share the work for files core did not write."""
    written = {
        path.relative_to(directory).as_posix(): record
        for path, record in records.items()
        if path.is_relative_to(directory)
    }
    known = _merge(run, written)
    place, of = (run.world.rank, run.world.size) if shared else (run.world.local_rank, run.world.local_size)
    added: dict[str, FileRecord] = {}
    with agreed(run, f"forcing {directory} to the disk"):
        _add_records(directory, [name for name in _files(directory) if name not in known][place::of], added)
    known |= _merge(run, added)
    with agreed(run, f"forcing {directory} to the disk"):
        if leads(run, shared):
            # Storage over a network may show a file to other machines a little later.
            _add_records(directory, [name for name in _files(directory) if name not in known], known)
    return {name: known[name] for name in sorted(known) if (directory / name).exists()}


def _merge(run: Run, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
    everyone = run.hooks.all_gather_object(run=run, value=records, group=None)
    return {name: record for part in everyone for name, record in part.items()}


def _files(directory: Path) -> list[str]:
    return sorted(
        (Path(place) / name).relative_to(directory).as_posix()
        for place, _, names in os.walk(directory)
        for name in names
    )


def _add_records(directory: Path, names: Sequence[str], records: dict[str, FileRecord]) -> None:
    for name in names:
        force_to_disk(directory / name)
        records[name] = checksum(directory / name)


def _manifest(
    accelerator: Accelerator, files: Mapping[str, FileRecord], taken_over: frozenset[int], iteration: int | None
) -> Manifest:
    run = accelerator.run
    return Manifest(
        drivetrain=__version__,
        torch=str(torch.__version__),
        created=layout.now(),
        processes=run.world.size,
        data_size=run.world.data_size,
        backend=run.names["backend"],
        precision=run.names["precision"],
        step=accelerator.gate.batches,
        iteration=iteration,
        files=files,
        **things(accelerator, taken_over),
    )


def things(accelerator: Accelerator, taken_over: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The objects of this run, by the manifest's names for their kinds."""
    known, run = accelerator.known, accelerator.run
    modules = [run.hooks.unwrap(run=run, model=model.wrapped) for model in known.models]
    return {
        "models": [
            Thing(model.kind, sum(parameter.numel() for parameter in module.parameters()), index not in taken_over)
            for index, (model, module) in enumerate(zip(known.models, modules, strict=True))
        ],
        "optimizers": [Thing(type(optimizer.optimizer).__name__) for optimizer in known.optimizers],
        "schedulers": [Thing(type(scheduler.scheduler).__name__) for scheduler in known.schedulers],
        "loaders": [Thing(type(loader).__name__) for loader in known.loaders],
        "custom": [Thing(type(thing).__name__) for thing in accelerator.registered],
        "scaler": None if accelerator.scaler is None else Thing(type(accelerator.scaler).__name__),
    }
