"""Single objects in files: anything torch can save, or a dict of tensors as safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.model_files import in_place, save_pickled, untie
from drivetrain.checkpoint.project import absolute
from drivetrain.checkpoint.tensors import TensorFile, write_tensors
from drivetrain.errors import CheckpointError

__all__ = ["load", "save", "write_object"]

_SAFE = ".safetensors"


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object, from the main process alone: whole or not at all. Without an Accelerator at hand.

    Args:
        obj: Anything ``torch.save`` takes; for safetensors a dict of tensors.
        f: Path, or a file open for writing.
        save_on_each_node: Save it from one process of each machine.
        safe_serialization: Write safetensors. A path that ends with ``.safetensors`` means it too.

    Raises:
        CheckpointError: The file can't be written, the object is no dict of tensors, or safetensors are to go to an
            open file.
    """
    from drivetrain.state import PartialState

    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        write_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None) -> Any:
    """Load what :func:`save` saved. Never runs code that is in the file: only tensors and plain values are read.

    Args:
        f: Path, or a file open for reading. Which format it has is seen by its content.
        map_location: Where tensors go, as in ``torch.load``; None: for safetensors the CPU. A device, where the file
            is in that format.

    Raises:
        CheckpointError: The file is damaged.
        OSError: It is missing or can't be read.
        pickle.UnpicklingError: The file holds more than that.
        TypeError: ``map_location`` is no device, and the file is in the safetensors format.
    """
    if not isinstance(f, (str, os.PathLike)):
        return torch.load(f, map_location=map_location, weights_only=True)
    path = absolute(f)
    if _looks_safe(path) or path.suffix == _SAFE:
        return _load_safe(path, map_location)
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except (EOFError, RuntimeError) as error:  # which don't say of which file they are
        raise CheckpointError(f"{path} is damaged: {str(error) or 'it ends too early'}") from error


def _looks_safe(path: Path) -> bool:
    """Whether a file begins as safetensors do: a length of eight bytes, then JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _load_safe(path: Path, map_location: Any) -> dict[str, Tensor]:
    if map_location is not None and not isinstance(map_location, (str, int, torch.device)):
        raise TypeError(
            f"map_location must be a device for {path}, which is in the safetensors format; got "
            f"{type(map_location).__name__}"
        )
    with TensorFile.open(path) as file:
        tensors = {name: file.read(name) for name in file.names}
        tensors |= {name: tensors[kept] for name, kept in file.aliases.items()}
    if map_location is None:
        return tensors
    moved = {id(tensor): tensor.to(map_location) for tensor in tensors.values()}
    return {name: moved[id(tensor)] for name, tensor in tensors.items()}


def write_object(obj: Any, f: Any, safe: bool) -> None:
    """Write an object from this process. Arguments as of :func:`save`."""
    if hasattr(f, "write"):
        if safe:
            raise CheckpointError("safe_serialization=True needs a path, not an open file, which torch.save writes to")
        torch.save(obj, f)
        return
    path = absolute(f)
    with in_place(path) as aside:
        if safe or path.suffix == _SAFE:
            _write_safe(aside, obj)
        else:
            save_pickled(aside, obj)


def _write_safe(path: Path, data: Any) -> None:
    if not isinstance(data, Mapping) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CheckpointError(
            f"only a dict of tensors can be saved as safetensors, not {type(data).__name__}; safe_serialization=False "
            f"and another ending save anything"
        )
    tensors, aliases = untie(data)
    write_tensors(path, tensors, aliases)
