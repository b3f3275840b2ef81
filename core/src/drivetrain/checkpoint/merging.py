"""The weights in a checkpoint as model files: without the run that saved it, its backend or its processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from drivetrain.checkpoint import layout
from drivetrain.checkpoint.atomic import find
from drivetrain.checkpoint.layout import Manifest
from drivetrain.checkpoint.model_files import present, write_model_files
from drivetrain.checkpoint.saved_weights import are_there, open_model
from drivetrain.errors import CheckpointError

__all__ = ["Merged", "merge_weights"]


@attrs.frozen
class Merged:
    """What became of one model of a checkpoint."""

    index: int
    """Its position in the order in which models were prepared."""
    kind: str
    """Name of its class."""
    files: tuple[Path, ...]
    """What was written; none if a hook of the user's had saved the model in a way of its own."""
    left_out: tuple[str, ...]
    """Names of entries of its state that are no tensors, which model files can't hold."""


def merge_weights(
    checkpoint: Path,
    output: Path,
    *,
    max_shard_size: int | str = "10GB",
    safe: bool = True,
    overwrite: bool = False,
) -> list[Merged]:
    """Write the weights in a checkpoint as ``save_model`` writes those of a run.

    It needs no processes and no devices: pieces of any number of ranks are read from their files, and each tensor is
    put together on the CPU.

    Args:
        checkpoint: What ``save_state`` wrote.
        output: Directory of the files. With several models in the checkpoint, each gets one in it that is named by its
            number, from 0 on.
        max_shard_size: Bytes of tensors in a file, or a text such as ``"10GB"``.
        safe: Safetensors; if not, ``torch.save``.
        overwrite: Whether model files that are there already are replaced. If not, they are an error.

    Returns:
        What became of each model.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or damaged, or has no weights; there are model files
            already, or one can't be written.
        ValueError: ``max_shard_size`` is no size.
    """
    directory = find(checkpoint)
    manifest = Manifest.read(directory)
    if output.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{output} is inside the checkpoint, which is not to be changed; write somewhere else")
    indices = [index for index, thing in enumerate(manifest.models) if thing.saved]
    if not indices:
        why = "its models were saved by a save_state pre-hook" if manifest.models else "no model was prepared"
        raise CheckpointError(f"{directory} has no weights: {why}")
    places = {index: output if len(manifest.models) == 1 else output / str(index) for index in indices}
    if not overwrite:
        _check_free(places.values(), safe)
    names = [name for name in manifest.files if name.startswith("models/")]
    manifest.check_sizes(directory, names)
    manifest.check_contents(directory, names)
    found: list[Merged] = []
    for index, thing in enumerate(manifest.models):
        files: list[Path] = []
        left_out: tuple[str, ...] = ()
        if thing.saved:
            _check_readable(directory, index, manifest)
            with open_model(directory, index) as model:
                state = {name: model.weights[name] for name in model.weights if name not in model.weights.aliases}
                state |= {alias: state[kept] for alias, kept in model.weights.aliases.items()}  # one tensor, as it was
                left_out = tuple(model.extra)
                files = write_model_files(places[index], state, max_shard_size=max_shard_size, safe=safe)
        found.append(Merged(index, thing.kind, tuple(files), left_out))
    return found


def _check_free(places: Iterable[Path], safe: bool) -> None:
    for place in places:
        if found := present(place, safe):
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise CheckpointError(
                f"{place} has {', '.join(found[:3])}{more} already; write to another directory, or overwrite them "
                f"(--overwrite)"
            )


def _check_readable(directory: Path, index: int, manifest: Manifest) -> None:
    if not are_there(directory, index):
        raise CheckpointError(
            f"{directory / layout.model(index)} has neither whole weights nor pieces: backend {manifest.backend!r} has "
            f"a format of its own. Load the checkpoint with that backend, and call save_model"
        )
