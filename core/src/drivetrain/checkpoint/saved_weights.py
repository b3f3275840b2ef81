"""The weights of one model in a checkpoint, whole or in pieces, read one by one under all their names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from drivetrain.checkpoint import layout, sharded_files
from drivetrain.checkpoint.model_files import Weights, is_there, open_weights
from drivetrain.checkpoint.sharded_files import ShardedFiles
from drivetrain.checkpoint.tree import read_tree

__all__ = ["SavedModel", "are_there", "open_model"]


class _WeightsInPieces(Mapping[str, Tensor]):
    """As ``Weights``; each value is put together when it is asked for."""

    def __init__(self, files: ShardedFiles, aliases: Mapping[str, str]) -> None:
        self._files = files
        self.aliases = aliases

    def __getitem__(self, name: str) -> Tensor:
        return self._files.read(self.aliases.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._files.layouts[self.aliases.get(name, name)].shape

    def __iter__(self) -> Iterator[str]:
        yield from self._files.layouts
        yield from self.aliases

    def __len__(self) -> int:
        return len(self._files.layouts) + len(self.aliases)


@attrs.frozen(eq=False)
class SavedModel:
    """What a checkpoint has of a model."""

    weights: Weights | _WeightsInPieces
    """To be copied from while the files are open."""
    extra: Mapping[str, Any]
    """Entries of its state that are no tensors."""


def are_there(directory: Path, index: int) -> bool:
    """Whether a checkpoint has weights of a model that can be read without the backend that wrote them."""
    place = directory / layout.model(index)
    return is_there(place) or sharded_files.is_sharded(place)


@contextlib.contextmanager
def open_model(directory: Path, index: int) -> Iterator[SavedModel]:
    """Open what a checkpoint has of a model for the length of the context.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    place = directory / layout.model(index)
    if sharded_files.is_sharded(place):
        with ShardedFiles.open(place) as files:
            yield SavedModel(_WeightsInPieces(files, files.others["aliases"]), files.others["extra"])
        return
    stem = directory / layout.model_extra(index)
    extra = read_tree(stem) if stem.with_name(f"{stem.name}.json").exists() else {}
    with open_weights(place) as weights:
        yield SavedModel(weights, extra)
