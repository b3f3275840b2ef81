"""Single objects in files: anything torch can save, or a dict of tensors as safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.model_files import in_place, save_pickled, untie
from drivetrain.checkpoint.tensors import write_tensors
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
        CheckpointError: The file can't be written, or the object is no dict of tensors.
    """
    from drivetrain.state import PartialState

    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        write_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None) -> Any:
    """Load what :func:`save` saved. Never runs code that is in the file: only tensors and plain values are read.

    Args:
        f: Path, or a file open for reading. A path that ends with ``.safetensors`` is read as such.
        map_location: Where tensors go, as in ``torch.load``; None: for safetensors the CPU.

    Raises:
        pickle.UnpicklingError: The file holds more than that.
    """
    if isinstance(f, (str, os.PathLike)) and os.fspath(f).endswith(_SAFE):
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(f, device="cpu" if map_location is None else str(map_location))
        return tensors
    return torch.load(f, map_location=map_location, weights_only=True)


def write_object(obj: Any, f: Any, safe: bool) -> None:
    """Write an object from this process. Arguments as of :func:`save`."""
    if hasattr(f, "write"):
        torch.save(obj, f)
        return
    path = Path(os.path.abspath(os.path.expanduser(f)))
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
