"""Reading a checkpoint: everything is looked at before anything is changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from drivetrain.checkpoint import gradients, layout, rng
from drivetrain.checkpoint.agreement import agreed
from drivetrain.checkpoint.atomic import find
from drivetrain.checkpoint.layout import Manifest, Thing
from drivetrain.checkpoint.tensors import read_tensors
from drivetrain.checkpoint.tree import read_tree
from drivetrain.checkpoint.writer import things
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.world import Run

__all__ = ["load_checkpoint"]

logger = logging.getLogger(__name__)


@attrs.define
class _Parts:
    """Everything but models and optimizers, read into memory. What is None is left as it is."""

    schedulers: list[Any] = attrs.field(factory=list)
    custom: list[Any] = attrs.field(factory=list)
    loaders: list[Any] = attrs.field(factory=list)
    scaler: Any = None
    accumulation: Any = None
    gradients: Mapping[str, Tensor] | None = None
    precision: Mapping[str, Any] = attrs.field(factory=dict)
    rng: Any = None
    rng_is_own: bool = True


def load_checkpoint(accelerator: Accelerator, target: Path, *, strict: bool = True, verify: bool = True) -> Manifest:
    """Load the whole state of a run into what was prepared and registered. Every rank must call it.

    Args:
        accelerator: Knows what was prepared and registered, in the order of the saved run.
        target: Absolute path of the checkpoint.
        strict: Whether anything that is only in the run or only in the checkpoint is an error; if not, it is a warning.
        verify: Compare the checksums of all files; if not, of the JSON ones alone.

    Returns:
        What the checkpoint says of itself.

    Raises:
        CheckpointError: On every rank, if anything is missing, damaged or does not fit.
    """
    run = accelerator.run
    with agreed(run, f"loading {target}"):
        directory = find(target)
        manifest = Manifest.read(directory)
    with _unless_replaced(directory, manifest):
        _load(accelerator, directory, manifest, strict, verify)
    with agreed(run, f"loading {target}"):
        _check_not_replaced(directory, manifest)
    _warn_of_kinds(things(accelerator), manifest, directory)
    return manifest


def _load(accelerator: Accelerator, directory: Path, manifest: Manifest, strict: bool, verify: bool) -> None:
    run = accelerator.run
    with agreed(run, f"loading {directory}"):
        _check_files(run, manifest, directory, verify, shared=not accelerator.project_configuration.save_on_each_node)
        _check_world(run, manifest, directory)
        _check_things(accelerator, manifest, directory, strict)
        parts = _read_parts(accelerator, manifest, directory)
    taken_over = _run_hooks(accelerator, directory)
    with agreed(run, f"loading {directory}"):
        _check_taken_over(manifest, taken_over, directory, strict)
    # Loaders first: they alone may find that they can't go on where the checkpoint is, and can be put back.
    with agreed(run, "restoring the loaders' positions"), _undone_on_error(accelerator.known.loaders):
        _load_loaders(accelerator, parts.loaders, strict)
    bundle = accelerator.known.bundle()
    bundle.taken_over = taken_over
    with agreed(run, f"hook 'load_state' of {run.hooks.owner('load_state') or 'core'}"):
        run.hooks.load_state(run=run, bundle=bundle, directory=directory, strict=strict)
    with agreed(run, f"loading {directory}"):
        _restore(accelerator, parts)


@contextlib.contextmanager
def _unless_replaced(directory: Path, manifest: Manifest) -> Iterator[None]:
    """Names the reason where files don't fit each other since another process saved there meanwhile."""
    try:
        yield
    except CheckpointError as error:
        with contextlib.suppress(OSError):
            _check_not_replaced(directory, manifest, error)
        raise


def _check_not_replaced(directory: Path, manifest: Manifest, error: CheckpointError | None = None) -> None:
    """Refuse what may be parts of two checkpoints: files are read one after the other."""
    try:
        same = Manifest.read(directory) == manifest
    except CheckpointError:
        same = directory.exists() and (directory / layout.MANIFEST).exists()
    if not same:
        raise CheckpointError(
            f"{directory} was replaced or deleted by another process while it was being loaded, so what was loaded may "
            f"be of two checkpoints; don't go on with this run, load it again"
        ) from error


# --------------------------------------------------------------------------------------------------- looking at it


def _check_files(run: Run, manifest: Manifest, directory: Path, verify: bool, shared: bool) -> None:
    """Ranks share the work."""
    place, of = (run.world.rank, run.world.size) if shared else (run.world.local_rank, run.world.local_size)
    names = sorted(manifest.files)[place::of]
    manifest.check_sizes(directory, names)
    manifest.check_contents(directory, [name for name in names if verify or name.endswith(".json")])


def _check_world(run: Run, manifest: Manifest, directory: Path) -> None:
    if run.hooks.owner("load_state") is None or run.capabilities.resharding or manifest.processes == run.world.size:
        return
    raise CheckpointError(
        f"{directory} was saved by {manifest.processes} processes, and backend {run.names['backend']!r} can't load it "
        f"with {run.world.size}; start {manifest.processes}"
    )


def _check_things(accelerator: Accelerator, manifest: Manifest, directory: Path, strict: bool) -> None:
    problems = []
    present = things(accelerator)
    for kind, words in (
        ("models", "prepared model(s)"),
        ("optimizers", "prepared optimizer(s)"),
        ("schedulers", "prepared scheduler(s)"),
        ("loaders", "prepared loader(s)"),
        ("custom", "object(s) registered for checkpointing"),
    ):
        have, saved = present[kind], getattr(manifest, kind)
        if len(have) != len(saved):
            problems.append(f"this run has {_listing(have)} {words}, but the checkpoint {_listing(saved)}")
    for index, (have, saved) in enumerate(zip(present["custom"], manifest.custom, strict=False)):
        if have.kind != saved.kind:
            problems.append(
                f"registered object {index} is a {have.kind}, but a {saved.kind} was saved; register them in the same "
                f"order"
            )
    _complain(problems, f"{directory} does not fit this run", strict)
    if (manifest.scaler is None) != (accelerator.scaler is None):
        what = "no" if manifest.scaler is None else "a"
        logger.warning(
            "%s was saved with mixed_precision %r and has %s loss scale; this run (%r) goes on %s",
            directory,
            manifest.precision,
            what,
            accelerator.run.names["precision"],
            "with its first one" if manifest.scaler is None else "without",
        )


def _warn_of_kinds(present: Mapping[str, Sequence[Thing]], manifest: Manifest, directory: Path) -> None:
    """Say which optimizers and schedulers are of another class. An engine's may well go on with what torch's saved."""
    for kind, word in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        for index, (have, saved) in enumerate(zip(present[kind], getattr(manifest, kind), strict=False)):
            if have.kind != saved.kind:
                logger.warning(
                    "%s: %s %d of this run (%s) took over what a %s had saved",
                    *(directory, word, index, have.kind, saved.kind),
                )


def _listing(found: Sequence[Thing]) -> str:
    return f"{len(found)} ({', '.join(thing.kind for thing in found)})" if found else "no"


def _complain(problems: Sequence[str], what: str, strict: bool) -> None:
    if not problems:
        return
    if strict:
        raise CheckpointError(
            f"{what}: {'; '.join(problems)}. Nothing was loaded. load_state(..., strict=False) loads what fits"
        )
    for problem in problems:
        logger.warning("%s: %s", what, problem)


def _read_parts(accelerator: Accelerator, manifest: Manifest, directory: Path) -> _Parts:
    run, rank = accelerator.run, accelerator.run.world.rank
    known = accelerator.known
    same = min(rank, manifest.processes - 1)
    parts = _Parts(
        schedulers=_each(directory, layout.scheduler, known.schedulers, manifest.schedulers),
        custom=_each(directory, layout.custom, accelerator.registered, manifest.custom),
        loaders=_each(directory, lambda index: layout.loader(index, same), known.loaders, manifest.loaders),
        accumulation=read_tree(directory / layout.ACCUMULATION),
        precision=_precision(run, manifest, directory),
        # Ranks that were not there all start from rank 0's state, so that any number of them is different by its rank.
        rng=read_tree(directory / layout.rng(rank if rank < manifest.processes else 0)),
        rng_is_own=rank < manifest.processes,
    )
    for index, (have, saved) in enumerate(zip(accelerator.registered, manifest.custom, strict=False)):
        if type(have).__name__ != saved.kind:
            parts.custom[index] = None
    if manifest.scaler is not None and accelerator.scaler is not None:
        parts.scaler = read_tree(directory / layout.SCALER)
    saved_gradients = layout.gradients(rank)
    if manifest.processes == run.world.size and saved_gradients.as_posix() in manifest.files:
        parts.gradients = read_tensors(directory / saved_gradients)
    return parts


def _precision(run: Run, manifest: Manifest, directory: Path) -> Mapping[str, Any]:
    """What the precision had learnt on this rank; empty if nothing was, or by another precision."""
    stem = layout.precision(run.world.rank if run.world.rank < manifest.processes else 0)
    if f"{stem.as_posix()}.json" not in manifest.files:
        return {}
    if manifest.precision != run.names["precision"]:
        logger.warning(
            "%s was saved with mixed_precision %r, whose own state this run (%r) leaves out",
            directory,
            manifest.precision,
            run.names["precision"],
        )
        return {}
    found: Mapping[str, Any] = read_tree(directory / stem)
    return found


def _each(directory: Path, stem: Any, present: Sequence[Any], saved: Sequence[Thing]) -> list[Any]:
    return [read_tree(directory / stem(index)) for index in range(min(len(present), len(saved)))]


# --------------------------------------------------------------------------------------------------- the user's hooks


def _run_hooks(accelerator: Accelerator, directory: Path) -> frozenset[int]:
    """Call the user's hooks; returns which models they loaded themselves, which are those they took out of the list."""
    models = list(accelerator.known.wrapped_models)
    with agreed(accelerator.run, "a load_state pre-hook"):
        for hook in accelerator.load_state_pre_hooks:
            hook(models, str(directory))
    left = {id(model) for model in models}
    return frozenset(index for index, model in enumerate(accelerator.known.wrapped_models) if id(model) not in left)


def _check_taken_over(manifest: Manifest, taken_over: frozenset[int], directory: Path, strict: bool) -> None:
    problems = [
        f"the weights of model {index} ({thing.kind}) were taken over by a save_state pre-hook, and no load_state "
        f"pre-hook loads them"
        for index, thing in enumerate(manifest.models)
        if not thing.saved and index not in taken_over
    ]
    _complain(problems, f"{directory} does not fit this run", strict)


# ------------------------------------------------------------------------------------------------- everything else


@contextlib.contextmanager
def _undone_on_error(loaders: Sequence[Any]) -> Iterator[None]:
    before = [(loader, loader.state_dict()) for loader in loaders if hasattr(loader, "state_dict")]
    try:
        yield
    except Exception:
        for loader, state in before:
            loader.load_state_dict(state)
        raise


def _load_loaders(accelerator: Accelerator, states: Sequence[Any], strict: bool) -> None:
    for index, (loader, state) in enumerate(zip(accelerator.known.loaders, states, strict=False)):
        if state is None or not hasattr(loader, "load_state_dict"):
            continue
        try:
            loader.load_state_dict(state)
        except ValueError as error:
            _complain([f"loader {index}: {error}"], "a loader can't go on where it was", strict)


def _restore(accelerator: Accelerator, parts: _Parts) -> None:
    for index, (scheduler, state) in enumerate(zip(accelerator.known.schedulers, parts.schedulers, strict=False)):
        with _refusing(f"scheduler {index} ({type(scheduler.scheduler).__name__})"):
            scheduler.load_state_dict(state)
    for index, (thing, state) in enumerate(zip(accelerator.registered, parts.custom, strict=False)):
        if state is not None:
            with _refusing(f"registered object {index} ({type(thing).__name__})"):
                thing.load_state_dict(state)
    if parts.scaler is not None:
        with _refusing("the gradient scaler"):
            accelerator.scaler.load_state_dict(parts.scaler)
    run = accelerator.run
    run.hooks.load_precision_state(run=run, models=accelerator.known.wrapped_models, state=parts.precision)
    _restore_accumulation(accelerator, parts)
    _restore_rng(run, parts)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} does not accept the state that was saved: {type(error).__name__}: {error}. Models, optimizers and "
            f"what comes before it are loaded already, so don't go on with this run"
        ) from error


def _restore_accumulation(accelerator: Accelerator, parts: _Parts) -> None:
    known, gate = accelerator.known, accelerator.gate
    saved = parts.accumulation
    gradients.clear(accelerator)
    groups = saved["groups"]
    unfinished = groups["blocks"] or groups["loaders"]
    if unfinished and parts.gradients is None:
        logger.warning(
            "the checkpoint was saved inside a group of micro-batches whose gradients can't be continued by this run: "
            "the group starts anew"
        )
        groups = {**groups, "blocks": [], "loaders": []}
    gate.load_state_dict(groups, known.wrapped_models, known.loaders)
    for optimizer, flags in zip(known.optimizers, saved["optimizers"], strict=False):
        goes_on = bool(unfinished) and parts.gradients is not None
        optimizer.held = flags["held"] and goes_on
        optimizer.finished = flags["finished"] and goes_on
        optimizer.step_was_skipped = flags["step_was_skipped"]
    if parts.gradients is not None:
        gradients.put_back(accelerator, parts.gradients)


def _restore_rng(run: Run, parts: _Parts) -> None:
    if parts.rng_is_own:
        rng.restore(run, parts.rng)
        return
    logger.warning(
        "rank %d was not in the saved run: its random numbers are seeded from rank 0's state and its own number",
        run.world.rank,
    )
    rng.seed_new_rank(run, parts.rng)
