"""Files of tensors in pieces: each rank writes what it holds, any number of ranks reads what it needs.

::

    sharded.json              what there is: shapes, dtypes, which rank wrote which elements, and whatever is no tensor
    rank_00000.safetensors    this rank's pieces, each in one dimension

Nothing is pickled. A piece held by several ranks is written by the lowest of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from drivetrain.checkpoint.agreement import agreed
from drivetrain.checkpoint.files import reading
from drivetrain.checkpoint.pieces import Layout, Part, Piece
from drivetrain.checkpoint.tensors import TensorFile, write_tensors
from drivetrain.checkpoint.tree import read_tree, write_tree
from drivetrain.errors import CheckpointError
from drivetrain.world import Run

__all__ = ["TOKEN", "ShardedFiles", "is_sharded", "write"]

_INDEX = "sharded"
_FORMAT, _VERSION = "drivetrain-sharded", 1


TOKEN = "sharded_tensor"
"""Key of what stands in other data for a tensor in pieces: ``{"sharded_tensor": its name}``."""


def is_sharded(directory: Path) -> bool:
    """Whether there are tensors in pieces in a directory."""
    return (directory / f"{_INDEX}.json").exists()


def write(
    run: Run, directory: Path, pieces: Mapping[str, Piece], layouts: Mapping[str, Layout], others: Any, owner: str
) -> None:
    """Write tensors of which each rank holds a piece. Every rank calls it.

    Args:
        run: The run.
        directory: On storage all ranks share. Made if it isn't there.
        pieces: What this rank holds.
        layouts: What ``survey`` said of them.
        others: Data of rank 0 that goes with them, of types a checkpoint can hold.
        owner: Whose they are, for messages.

    Raises:
        CheckpointError: On every rank, if one of them failed.
    """
    rank = run.world.rank
    with agreed(run, f"saving {owner}"):
        directory.mkdir(parents=True, exist_ok=True)
        mine = {
            name: pieces[name].read()
            for name, layout in layouts.items()
            if any(part.rank == rank for part in layout.parts) and name in pieces
        }
        if mine:
            write_tensors(directory / _file(rank), mine)
        if rank == 0:
            index = {
                "format": _FORMAT,
                "version": _VERSION,
                "tensors": {name: _entry(layout) for name, layout in layouts.items()},
                "others": others,
            }
            write_tree(directory / _INDEX, index, owner)


def _file(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def _entry(layout: Layout) -> dict[str, Any]:
    return {
        "shape": list(layout.shape),
        "dtype": layout.dtype,
        "parts": [[part.start, part.stop, part.rank] for part in layout.parts],
    }


def _layout(name: str, entry: Mapping[str, Any]) -> Layout:
    """What an index says of a tensor.

    Raises:
        ValueError: It makes no sense. Parts that leave gaps would let through whatever was in memory, and ranks that
            are no numbers would lead to files elsewhere.
    """
    layout = Layout(tuple(entry["shape"]), entry["dtype"], tuple(Part(*part) for part in entry["parts"]))
    numbers = [*layout.shape, *(number for part in layout.parts for number in attrs.astuple(part))]
    bounds = [0, *(part.stop for part in layout.parts)]
    if not (
        isinstance(layout.dtype, torch.dtype)
        and all(type(number) is int and number >= 0 for number in numbers)
        and all(part.start == before < part.stop for part, before in zip(layout.parts, bounds, strict=False))
        and bounds[-1] == math.prod(layout.shape)
    ):
        raise ValueError(f"what it says of {name!r} makes no sense")
    return layout


@attrs.frozen(eq=False)
class ShardedFiles:
    """Tensors in pieces in a directory, open for reading."""

    directory: Path
    layouts: Mapping[str, Layout]
    others: Any
    _files: dict[int, TensorFile]
    _stack: contextlib.ExitStack

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: Path) -> Iterator[ShardedFiles]:
        """Open what :func:`write` wrote for the length of the context.

        Raises:
            CheckpointError: It is missing, damaged, or of a later version of the format.
        """
        index = read_tree(directory / _INDEX)
        if not isinstance(index, dict) or (index.get("format"), index.get("version")) != (_FORMAT, _VERSION):
            raise CheckpointError(f"{directory / _INDEX}.json is no index of sharded tensors this version can read")
        with reading(directory / f"{_INDEX}.json"):
            layouts = {name: _layout(name, entry) for name, entry in index["tensors"].items()}
        with contextlib.ExitStack() as stack:
            yield cls(directory, layouts, index["others"], {}, stack)

    def read_into(self, name: str, piece: Piece) -> None:
        """Fill a piece with its elements, whichever ranks wrote them.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        for part in self.layouts[name].parts:
            start, stop = max(part.start, piece.start), min(part.stop, piece.stop)
            if start < stop:
                held = self._file(part.rank).mapped(name)
                self._check(name, held, part)
                piece.write(held[start - part.start : stop - part.start], start)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        layout = self.layouts[name]
        whole = Piece(torch.empty(layout.shape, dtype=layout.dtype), 0, layout.shape)
        self.read_into(name, whole)
        return whole.local

    def with_wholes(self, data: Any) -> Any:
        """Nested dicts with whole tensors in place of the tokens that stand for them."""
        if not isinstance(data, dict):
            return data
        if data.keys() == {TOKEN}:
            return self.read(data[TOKEN])
        return {key: self.with_wholes(value) for key, value in data.items()}

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = self._stack.enter_context(TensorFile.open(self.directory / _file(rank)))
        return self._files[rank]

    def _check(self, name: str, held: Tensor, part: Part) -> None:
        if held.shape != (part.stop - part.start,):
            raise CheckpointError(
                f"{self.directory / _file(part.rank)} is damaged: {name} has shape {tuple(held.shape)}, and its index "
                f"says {part.stop - part.start} elements"
            )
