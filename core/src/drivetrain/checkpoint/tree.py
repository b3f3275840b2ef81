"""Nested Python data as JSON and tensors, and back, exactly and without unpickling.

Values JSON has are written as they are. Any other is an object with one key that starts with ``$`` and says what it
is: ``{"$tuple": [1, 2]}``, ``{"$tensor": "shadow.weight"}``. Tensors and arrays go to a safetensors file beside the
JSON, by the path they have in the data. The set of types is closed: reading makes nothing else, whatever a file says.

What is not kept: which containers were one object in two places (tensors are: one memory, one tensor again), the device
of a tensor (it comes back on the CPU), and that it was a parameter.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.checkpoint.files import read_json, reading, write_json
from drivetrain.checkpoint.tensors import check_savable, dtype_named, read_tensors, same_memory, write_tensors
from drivetrain.errors import CheckpointError

__all__ = ["decode", "encode", "read_tree", "write_tree"]

_FACTORIES: Mapping[str, Any] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
"""What a defaultdict may make; any other function could not be written down."""


def write_tree(stem: Path, data: Any, owner: str) -> None:
    """Write ``stem.json``, and ``stem.safetensors`` if there are tensors in the data.

    Args:
        stem: Path without an ending.
        data: Any nesting of the types this module knows.
        owner: Whose data it is, for messages.

    Raises:
        CheckpointError: Something in the data is of another type, or a file can't be written.
    """
    tree, tensors = encode(data, owner)
    if tensors:
        write_tensors(_with_ending(stem, ".safetensors"), tensors)
    write_json(_with_ending(stem, ".json"), tree)


def read_tree(stem: Path) -> Any:
    """Read what ``write_tree`` wrote.

    Raises:
        CheckpointError: A file is missing, damaged, or of a newer version of this format.
    """
    tensors = _with_ending(stem, ".safetensors")
    path = _with_ending(stem, ".json")
    tree = read_json(path)
    with reading(path):
        return decode(tree, read_tensors(tensors) if tensors.exists() else {})


def _with_ending(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)


# ------------------------------------------------------------------------------------------------------------- writing


def encode(data: Any, owner: str = "the data") -> tuple[Any, dict[str, Tensor]]:
    """Data as what JSON can hold, and the tensors in it by name.

    Raises:
        CheckpointError: Something is of a type this module doesn't know; the text has its path inside the data.
    """
    encoder = _Encoder(owner)
    return encoder.value(data, ()), encoder.tensors


class _Encoder:
    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._open: set[int] = set()
        """Ids of the containers around the current value."""

    def value(self, data: Any, path: tuple[Any, ...]) -> Any:
        kind = type(data)
        if data is None or kind is bool:
            return data
        if kind is int:
            # Python itself refuses to write very long numbers as decimals.
            return data if -(1 << 63) <= data < 1 << 64 else {"$int": hex(data)}
        if kind in _CONTAINERS:
            return self._container(data, path)
        if kind in _SCALARS:
            return _SCALARS[kind](data)
        if isinstance(data, Tensor):
            return {"$tensor": self._tensor(data, path)}
        if kind in (np.ndarray, np.memmap):
            return self._array(data, path)
        if isinstance(data, np.generic) and not data.dtype.hasobject and data.dtype.names is None:
            return {"$numpy": [data.dtype.str, data.tobytes().hex()]}
        raise CheckpointError(f"{self._at(path)} can't be saved: it is {_describe(data)}. {_advice(data)}")

    def _at(self, path: tuple[Any, ...]) -> str:
        return self._owner + "".join(f"[{key!r}]" for key in path)

    def _container(self, data: Any, path: tuple[Any, ...]) -> Any:
        if id(data) in self._open:
            raise CheckpointError(f"{self._at(path)} can't be saved: it contains itself")
        self._open.add(id(data))
        try:
            return _CONTAINERS[type(data)](self, data, path)
        except RecursionError:
            raise CheckpointError(f"{self._owner} can't be saved: it is nested too deeply") from None
        finally:
            self._open.discard(id(data))

    def items(self, data: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.value(item, (*path, index)) for index, item in enumerate(data)]

    def members(self, data: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        # A set has no order of its own; one of texts and numbers gets the same each time.
        return sorted(self.items(data, path), key=repr)

    def pairs(self, data: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
        return [[self.value(key, (*path, key)), self.value(item, (*path, key))] for key, item in data.items()]

    def mapping(self, data: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        if all(type(key) is str and key.isascii() and not key.startswith("$") for key in data):
            return {key: self.value(item, (*path, key)) for key, item in data.items()}
        return {"$dict": self.pairs(data, path)}

    def default_mapping(self, data: defaultdict[Any, Any], path: tuple[Any, ...]) -> Any:
        factory = data.default_factory
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise CheckpointError(
                f"{self._at(path)} can't be saved: it is a defaultdict that makes its values by {factory!r}; save "
                f"dict(...) of it"
            )
        return {"$defaultdict": [name, self.pairs(data, path)]}

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        check_savable(tensor, self._at(path))
        memory = same_memory(tensor)
        if memory is not None and memory in self._names:
            return self._names[memory]
        name = self._free_name(path)
        self.tensors[name] = tensor
        if memory is not None:
            self._names[memory] = name
        return name

    def _array(self, array: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Any:
        if array.dtype.hasobject or array.dtype.kind not in "biufcmMSU":
            raise CheckpointError(
                f"{self._at(path)} can't be saved: it is an array of {array.dtype}, not of numbers, texts or times"
            )
        name = self._free_name(path)
        self.tensors[name] = torch.from_numpy(np.frombuffer(bytearray(array.tobytes()), dtype=np.uint8))
        return {"$array": [name, array.dtype.str, list(array.shape)]}

    def _free_name(self, path: tuple[Any, ...]) -> str:
        """A tensor's path as one name. Other paths may give the same, so a number tells them apart."""
        wanted = ".".join(str(key) for key in path).encode("ascii", "backslashreplace").decode() or "value"
        name, number = wanted, 1
        while name in self.tensors or name == "__metadata__":
            name, number = f"{wanted}#{number}", number + 1
        return name


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value  # written with the fewest digits that read back as the same number
    return {"$float": struct.pack(">d", value).hex() if math.isnan(value) else repr(value)}


def _text(value: str) -> Any:
    # Halves of surrogate pairs are no text for JSON, which would join two of them to one character.
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        return {"$text": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


_CONTAINERS: Mapping[type, Callable[[_Encoder, Any, tuple[Any, ...]], Any]] = {
    dict: _Encoder.mapping,
    list: _Encoder.items,
    tuple: lambda encoder, data, path: {"$tuple": encoder.items(data, path)},
    set: lambda encoder, data, path: {"$set": encoder.members(data, path)},
    frozenset: lambda encoder, data, path: {"$frozenset": encoder.members(data, path)},
    deque: lambda encoder, data, path: {"$deque": [data.maxlen, encoder.items(data, path)]},
    OrderedDict: lambda encoder, data, path: {"$ordered": encoder.pairs(data, path)},
    Counter: lambda encoder, data, path: {"$counter": encoder.pairs(data, path)},
    defaultdict: _Encoder.default_mapping,
}

_SCALARS: Mapping[type, Callable[[Any], Any]] = {
    float: _float,
    str: _text,
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"$bytes": _base64(value)},
    bytearray: lambda value: {"$bytearray": _base64(value)},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
    torch.Size: lambda value: {"$size": list(value)},
}


def _describe(data: Any) -> str:
    if isinstance(data, type):
        return f"the class {data.__module__}.{data.__qualname__}"
    return f"of type {type(data).__module__}.{type(data).__qualname__}"


def _advice(data: Any) -> str:
    if isinstance(data, torch.Generator):
        return "Save its get_state()."
    if callable(getattr(data, "state_dict", None)):
        return "Save its state_dict()."
    if isinstance(data, tuple) and hasattr(data, "_asdict"):
        return "Save tuple(...) or _asdict() of it."
    return "Save plain values: numbers, texts, lists, tuples, dicts, sets, bytes, tensors, arrays."


# ------------------------------------------------------------------------------------------------------------- reading


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``encode`` was given.

    Raises:
        ValueError: The tree has a type this version doesn't know, or names a tensor that isn't there.
    """
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in tree.items()}
    if len(tree) != 1 or tag not in _READERS:
        raise ValueError(f"it holds a value of kind {tag!r}, which this version can't read")
    try:
        return _READERS[tag](tree[tag], tensors)
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its value of kind {tag!r} makes no sense ({type(error).__name__}: {error})") from error


def _pairs(content: Any, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors), decode(item, tensors)) for key, item in content]


def _read_float(content: Any, tensors: Mapping[str, Tensor]) -> float:
    if content in ("inf", "-inf"):
        return float(content)
    value: float = struct.unpack(">d", bytes.fromhex(content))[0]
    return value


def _read_array(content: Any, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    name, dtype, shape = content
    return np.frombuffer(tensors[name].numpy().tobytes(), dtype=_array_dtype(dtype)).reshape(shape).copy()


def _read_numpy(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    name, data = content
    dtype = _array_dtype(name)
    # An empty text has no bytes to be read from.
    return np.frombuffer(bytes.fromhex(data), dtype=dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _array_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("it holds an array of Python objects, which is never read")
    return dtype


def _read_defaultdict(content: Any, tensors: Mapping[str, Tensor]) -> defaultdict[Any, Any]:
    factory, pairs = content
    return defaultdict(None if factory is None else _FACTORIES[factory], _pairs(pairs, tensors))


_READERS: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$int": lambda content, tensors: int(content, 16),
    "$float": _read_float,
    "$text": lambda content, tensors: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
    "$complex": lambda content, tensors: complex(*decode(content, tensors)),
    "$bytes": lambda content, tensors: base64.b64decode(content),
    "$bytearray": lambda content, tensors: bytearray(base64.b64decode(content)),
    "$dtype": lambda content, tensors: dtype_named(content),
    "$device": lambda content, tensors: torch.device(content),
    "$size": lambda content, tensors: torch.Size(content),
    "$tuple": lambda content, tensors: tuple(decode(content, tensors)),
    "$set": lambda content, tensors: set(decode(content, tensors)),
    "$frozenset": lambda content, tensors: frozenset(decode(content, tensors)),
    "$deque": lambda content, tensors: deque(decode(content[1], tensors), content[0]),
    "$dict": lambda content, tensors: dict(_pairs(content, tensors)),
    "$ordered": lambda content, tensors: OrderedDict(_pairs(content, tensors)),
    "$counter": lambda content, tensors: Counter(dict(_pairs(content, tensors))),
    "$defaultdict": _read_defaultdict,
    "$tensor": lambda content, tensors: tensors[content],
    "$array": _read_array,
    "$numpy": _read_numpy,
}
