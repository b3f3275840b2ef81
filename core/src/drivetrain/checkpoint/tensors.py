"""Tensors in the safetensors format, written one at a time.

The format is an 8-byte length, a JSON header of that length and the bytes of all tensors. The library's own writer
wants every tensor on the CPU at once, and leaves no place for a checksum; ours brings them from the device one by one.
It is the library that reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.checkpoint.files import create, reading
from drivetrain.errors import CheckpointError

__all__ = ["RESERVED", "TensorFile", "check_savable", "nbytes", "read_tensors", "same_memory", "write_tensors"]

# Dtypes every safetensors reader knows. Others are written as bytes, with their dtype and shape in the metadata.
_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_AS_BYTES = "stored_as_bytes"
"""Key of the metadata with ``{name: [dtype, shape]}`` of tensors whose dtype the format lacks."""
RESERVED = ("format", _AS_BYTES)
"""Keys of the metadata that are no names of tensors, whatever tensors there are."""


def nbytes(tensor: Tensor) -> int:
    """Bytes a tensor takes in a file."""
    return tensor.numel() * tensor.element_size()


def same_memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """What two tensors have in common exactly if they are one in memory; None for those without any."""
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (storage.device, storage.data_ptr(), *layout)


def check_savable(tensor: Tensor, where: str) -> None:
    """Refuse tensors that have no plain memory of their own to be written.

    Raises:
        CheckpointError: The tensor is sparse, quantized, on the meta device or a wrapper around others.
    """
    problem = None
    if is_traceable_wrapper_subclass(tensor):
        problem = f"a {type(tensor).__name__}, which wraps others (full_tensor() or dequantize() give a plain one)"
    elif tensor.layout is not torch.strided:
        problem = "sparse (to_dense() gives a plain one)"
    elif tensor.is_quantized:
        problem = "quantized (int_repr() and its scale can be saved)"
    elif tensor.device.type == "meta":
        problem = "on the meta device, where it has no values"
    if problem:
        raise CheckpointError(f"{where} can't be saved: it is {problem}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. The same tensors give the same bytes, in whatever order they come.

    Args:
        path: Of the file.
        tensors: On any device, of any dtype and strides.
        metadata: For the file's header.

    Raises:
        CheckpointError: A tensor can't be saved, or the file can't be written.
    """
    if "__metadata__" in tensors:
        raise CheckpointError(f"{path} can't hold a tensor called '__metadata__', which the format uses itself")
    for name, tensor in tensors.items():
        check_savable(tensor, f"tensor {name!r} for {path}")
    # The widest first, so that every tensor lies at a multiple of its element's size and can be mapped.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    with create(path) as file:
        file.write(_header(order, tensors, metadata or {}))
        for name in order:
            file.write(_as_bytes(tensors[name]).numpy())


def _header(order: Iterable[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    as_bytes: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + nbytes(tensor)
        shape = list(tensor.shape)
        if tensor.dtype not in _NAMES:
            as_bytes[name] = [str(tensor.dtype).removeprefix("torch."), shape]
            shape = [end - start]
        header[name] = {"dtype": _NAMES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [start, end]}
    if as_bytes:
        header["__metadata__"][_AS_BYTES] = json.dumps(as_bytes)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = plain.reshape(-1)
    # One element is contiguous whatever its stride, but only with 1 can it be seen as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


@attrs.frozen(eq=False)
class TensorFile:
    """An open safetensors file whose tensors are read when they are asked for."""

    path: Path
    _file: Any
    metadata: Mapping[str, str]
    _as_bytes: Mapping[str, Any]

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[TensorFile]:
        """Open a file for the length of the context.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        try:
            with contextlib.ExitStack() as stack:
                with reading(path):
                    path.stat()  # the library's own error for a missing file is of no use to us
                    file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
                    metadata = dict(file.metadata() or {})
                    as_bytes = json.loads(metadata.pop(_AS_BYTES, "{}"))
                yield cls(path, file, metadata, as_bytes)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file.keys())

    @property
    def aliases(self) -> dict[str, str]:
        """For each further name of a tensor the one it is kept under."""
        kept = set(self.names)
        # Every file says {"format": "pt"}, and a tensor may well be called "pt".
        return {name: value for name, value in self.metadata.items() if value in kept and name not in RESERVED}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        if name in self._as_bytes:
            with reading(self.path):
                return tuple(map(int, self._as_bytes[name][1]))
        return tuple(self._file.get_slice(name).get_shape())

    def mapped(self, name: str) -> Tensor:
        """A tensor that may be a view of the file itself: to be copied from, not kept."""
        return self._in_dtype(name, self._file.get_tensor(name))

    def read(self, name: str) -> Tensor:
        """A tensor of its own on the CPU, which outlives the file."""
        return self._in_dtype(name, self._file.get_tensor(name).clone())

    def _in_dtype(self, name: str, stored: Tensor) -> Tensor:
        if name not in self._as_bytes:
            return stored
        with reading(self.path):
            dtype, shape = self._as_bytes[name]
            try:
                return stored.view(dtype_named(dtype)).reshape(shape)
            except RuntimeError as error:
                raise ValueError(f"tensor {name!r} does not fit what is said of it: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU, in memory of their own.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    with TensorFile.open(path) as file:
        return {name: file.read(name) for name in file.names}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        ValueError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype
