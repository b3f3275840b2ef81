"""Models and optimizers in a checkpoint, as core writes them: full weights, and optimizer state by parameter name.

Backends whose ranks hold parts of a model may answer the hooks ``save_state`` and ``load_state`` in another way. What
they write in pieces (``sharded_files``) is read here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drivetrain.checkpoint import layout, sharded_files
from drivetrain.checkpoint.agreement import agreed
from drivetrain.checkpoint.layout import Manifest
from drivetrain.checkpoint.model_files import write_model_files
from drivetrain.checkpoint.optimizer_names import by_name, by_position, plain_name
from drivetrain.checkpoint.saved_weights import are_there, open_model
from drivetrain.checkpoint.sharded_files import ShardedFiles
from drivetrain.checkpoint.tree import read_tree, write_tree
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.bundle import Bundle
    from drivetrain.world import Run

__all__ = ["full_weights", "leads", "load_bundle", "save_bundle"]


def leads(run: Run, shared_storage: bool) -> bool:
    """Whether this process writes what is common to all."""
    return (run.world.rank if shared_storage else run.world.local_rank) == 0


def full_weights(run: Run, model: nn.Module) -> dict[str, Any]:
    """The full state dict of a prepared model by the names of the user's module. Every rank must call it."""
    return {plain_name(name): value for name, value in run.hooks.model_state(run=run, model=model).items()}


# -------------------------------------------------------------------------------------------------------------- saving


def save_bundle(run: Run, bundle: Bundle, directory: Path) -> None:
    """Core's answer to the hook ``save_state``: full weights, and optimizer state by parameter name."""
    writes = leads(run, bundle.shared_storage)
    for index, model in enumerate(bundle.models):
        if index in bundle.taken_over:
            continue
        bare = run.hooks.unwrap(run=run, model=model)
        state = full_weights(run, model)
        label = bundle.model_label(index)
        with agreed(run, f"saving {label}"):
            if writes:
                _write_model(directory, index, bare, state, label)
    for index, optimizer in enumerate(bundle.optimizers):
        label = f"optimizer {index} ({type(optimizer).__name__})"
        full = run.hooks.optimizer_state(run=run, optimizer=optimizer, models=bundle.models_of(index))
        with agreed(run, f"saving {label}"):
            if writes:
                write_tree(directory / layout.optimizer(index), by_name(full, bundle.names[index]), f"state of {label}")


def _write_model(directory: Path, index: int, module: nn.Module, state: Mapping[str, Any], label: str) -> None:
    if not state and any(True for _ in module.parameters()):
        raise CheckpointError(
            f"the backend gives the full weights of {label} to rank 0 only, so they can't be saved on each machine"
        )
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if name not in tensors}
    write_model_files(directory / layout.model(index), tensors, module=module)
    if others:
        write_tree(directory / layout.model_extra(index), others, f"state of {label}")


# ------------------------------------------------------------------------------------------------------------- loading


def load_bundle(run: Run, bundle: Bundle, directory: Path, strict: bool) -> None:
    """Core's answer to the hook ``load_state``: what ``save_bundle`` or ranks in pieces wrote, checked, then loaded."""
    models: list[int] = []
    optimizers: dict[int, dict[str, Any]] = {}
    with agreed(run, f"loading {directory}"):
        for index, model in enumerate(bundle.models):
            if index not in bundle.taken_over and _there(directory, index, strict):
                _check_weights(run, directory, index, model, strict, bundle.model_label(index))
                models.append(index)
        for index, optimizer in enumerate(bundle.optimizers):
            owner = f"optimizer {index} ({type(optimizer).__name__})"
            saved = _optimizer_state(directory, index, strict)
            if saved is not None:
                optimizers[index] = by_position(saved, bundle.names[index], optimizer, owner)
    for index in models:
        _load_weights(run, directory, index, bundle.models[index], strict)
    for index, state in optimizers.items():
        run.hooks.load_optimizer_state(
            run=run, optimizer=bundle.optimizers[index], models=bundle.models_of(index), state=state
        )


def _there(directory: Path, index: int, strict: bool) -> bool:
    place = directory / layout.model(index)
    if are_there(directory, index):
        return True
    if strict:
        backend = Manifest.read(directory).backend if (directory / layout.MANIFEST).exists() else "another"
        raise CheckpointError(
            f"{place} has neither whole weights nor pieces; the checkpoint was written by backend {backend!r}, which "
            f"may have a format of its own: load it with that backend, and write the weights for others by save_model, "
            f"or the next state by a setting of that backend for whole files, if it has one"
        )
    return False


def _check_weights(run: Run, directory: Path, index: int, model: nn.Module, strict: bool, label: str) -> None:
    """Refuse weights that don't fit, before any are loaded."""
    if run.capabilities.shards_params:
        return  # what a rank holds does not tell the shape of the whole
    bare = run.hooks.unwrap(run=run, model=model)
    expected = {plain_name(name): value for name, value in bare.state_dict().items()}
    with open_model(directory, index) as found:
        shapes = {name: found.weights.shape(name) for name in found.weights}
        extra = found.extra
    problems = [
        f"{name} is of shape {shapes[name]} there, and {tuple(value.shape)} here"
        for name, value in expected.items()
        if isinstance(value, Tensor) and name in shapes and tuple(value.shape) != shapes[name]
    ]
    if strict:
        saved = [*shapes, *extra]
        problems += [f"{name} was not saved" for name in expected if name not in saved]
        problems += [f"{name} was saved, but the model has no such entry" for name in saved if name not in expected]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the weights in {directory / layout.model(index)} do not fit {label}: "
            f"{'; '.join(problems[:5])}{more}. Nothing was loaded"
        )


def _optimizer_state(directory: Path, index: int, strict: bool) -> Any:
    """As ``by_name`` gave it, with whole tensors; None if it isn't there and need not be."""
    stem = directory / layout.optimizer(index)
    if sharded_files.is_sharded(stem.parent):
        with ShardedFiles.open(stem.parent) as files:
            return files.with_wholes(files.others)
    return read_tree(stem) if strict or stem.with_name(f"{stem.name}.json").exists() else None


def _load_weights(run: Run, directory: Path, index: int, model: nn.Module, strict: bool) -> None:
    bare = run.hooks.unwrap(run=run, model=model)
    with open_model(directory, index) as found:
        state: Mapping[str, Any] = {**found.weights, **found.extra} if found.extra else found.weights
        run.hooks.load_model_state(run=run, model=model, state=_as_in(bare, state), strict=strict)


def _as_in(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state under the names of a module of which parts are compiled."""
    if not any("_orig_mod" in name for name, _ in module.named_modules()):
        return state
    names = {plain_name(name): name for name in module.state_dict()}
    return {names.get(name, name): state[name] for name in state}
