"""The weights of one model as files other tools read: one safetensors file, or several with an index.

Names, index and metadata are those the ecosystem has settled on. Names that share one tensor are written once; the
metadata says which name stands for which (``{alias: kept}``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drivetrain.checkpoint.atomic import new_token
from drivetrain.checkpoint.files import create, force_to_disk, read_json, reading, rename, write_json
from drivetrain.checkpoint.optimizer_names import plain_name
from drivetrain.checkpoint.tensors import RESERVED, TensorFile, check_savable, nbytes, same_memory, write_tensors
from drivetrain.errors import CheckpointError

__all__ = [
    "Weights",
    "parse_size",
    "in_place",
    "is_there",
    "open_weights",
    "present",
    "save_pickled",
    "untie",
    "write_model_files",
]

logger = logging.getLogger(__name__)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(size: int | str) -> int:
    """A size such as ``"10GB"`` or ``"500MiB"`` in bytes.

    Raises:
        ValueError: It is no size, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    count = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0
    if not 1 <= count < math.inf:
        raise ValueError(f"{size!r} is no size; give a number of bytes, or a text such as '10GB' or '500MiB'")
    return int(count)


# ------------------------------------------------------------------------------------------------------------- writing


def untie(state: Mapping[str, Tensor], module: nn.Module | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A state dict with every tensor once, and for each name left out the one kept.

    Args:
        state: Full tensors by name.
        module: What it is the state of. Its ties count too: a backend that gathers tensors may have made one of each.
    """
    owners: dict[str, Any] = {}
    if module is not None:
        owners = {plain_name(name): id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    known: dict[Any, str] = {}
    for name, tensor in state.items():
        keys = [key for key in (owners.get(name), same_memory(tensor)) if key is not None]
        first = next((known[key] for key in keys if key in known), name)
        known.update(dict.fromkeys(keys, first))
        if first == name or name in RESERVED:  # such a name can't be an alias in a file's metadata
            kept[name] = tensor
        else:
            aliases[name] = first
    return kept, aliases


@attrs.frozen
class _Format:
    """A family of file names, and what writes one file."""

    stem: str
    ending: str
    write: Callable[[Path, Mapping[str, Tensor], Mapping[str, str]], None]

    @property
    def single(self) -> str:
        return f"{self.stem}{self.ending}"

    @property
    def index(self) -> str:
        return f"{self.stem}{self.ending}.index.json"

    def shard(self, number: int, count: int) -> str:
        return f"{self.stem}-{number:05}-of-{count:05}{self.ending}"

    def present(self, directory: Path) -> set[str]:
        """Names of this format that are in a directory."""
        shard = re.compile(rf"{self.stem}-\d{{5}}-of-\d{{5}}{re.escape(self.ending)}")
        names = {path.name for path in directory.iterdir()}
        return {name for name in names if name in (self.single, self.index) or shard.fullmatch(name)}


def save_pickled(path: Path, data: Any) -> None:
    """``torch.save`` to a file that is whole and on the disk."""
    with create(path) as file:
        torch.save(data, _Sink(file.write))


@attrs.frozen
class _Sink:
    """As much of a file as ``torch.save`` needs to write to one."""

    _write: Callable[[Any], None]

    def write(self, data: Any) -> int:
        # The buffer is torch's and used again, while the checksum is still being computed.
        self._write(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing to do: the file is flushed when it is closed."""


def _write_pickled(path: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    # One object under two names is one when it is loaded. Copies, so that a small view does not bring a large storage.
    plain = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_pickled(path, {**plain, **{name: plain[kept] for name, kept in aliases.items()}})


_SAFE = _Format("model", ".safetensors", write_tensors)
_PICKLED = _Format("pytorch_model", ".bin", _write_pickled)


def write_model_files(
    directory: Path,
    state: Mapping[str, Tensor],
    *,
    module: nn.Module | None = None,
    max_shard_size: int | str = "10GB",
    safe: bool = True,
) -> list[Path]:
    """Write full weights into a directory, replacing what was written there before.

    Each file is written aside and renamed. Shards and the index of an earlier, larger save go last; nothing else in the
    directory is touched.

    Args:
        directory: Made if it isn't there.
        state: Full tensors by name.
        module: What it is the state of.
        max_shard_size: Bytes of tensors in a file; one tensor is never cut.
        safe: Safetensors; if not, ``torch.save``.

    Returns:
        The files.

    Raises:
        CheckpointError: Something in the state is no tensor, or a file can't be written.
        ValueError: ``max_shard_size`` is no size.
    """
    limit = parse_size(max_shard_size)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} can't be saved as a weight: it is a {type(value).__name__}; save_state keeps such state"
            )
        check_savable(value, f"weight {name!r}")
    form = _SAFE if safe else _PICKLED
    tensors, aliases = untie(state, module)
    shards = _cut(tensors, limit)
    names = [form.single] if len(shards) == 1 else [form.shard(k + 1, len(shards)) for k in range(len(shards))]
    _make_directory(directory)
    with _aside(directory) as pending:
        for name, shard in zip(names, shards, strict=True):
            form.write(pending(name), shard, {alias: kept for alias, kept in aliases.items() if kept in shard})
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {
                "metadata": {"total_size": sum(map(nbytes, tensors.values()))},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_json(pending(form.index), index, indent=1)
            names.append(form.index)
    for stale in form.present(directory) - set(names):
        try:
            (directory / stale).unlink()
        except OSError as error:
            raise CheckpointError(
                f"the model is saved, but {directory / stale} of an earlier save can't be deleted: {error.strerror}"
            ) from error
    if others := (_PICKLED if safe else _SAFE).present(directory):
        logger.warning("%s also has %s, of an earlier save in the other format", directory, ", ".join(sorted(others)))
    return [directory / name for name in names]


def present(directory: Path, safe: bool) -> list[str]:
    """Names of the files of a model that are in a directory, whole or in shards."""
    return sorted((_SAFE if safe else _PICKLED).present(directory)) if directory.is_dir() else []


def _cut(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = nbytes(tensor)
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= size
    return shards


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"{directory} is a file; give a directory to save the model in") from None
    except OSError as error:
        raise CheckpointError(f"can't make the directory {directory}: {error.strerror}") from error


@contextlib.contextmanager
def _aside(directory: Path) -> Iterator[Callable[[str], Path]]:
    """Gives paths to write to; they get their names, in the order they were asked for, when the context ends well."""
    token = new_token()
    names: list[str] = []

    def pending(name: str) -> Path:
        names.append(name)
        return directory / f".{name}.partial-{token}"

    try:
        yield pending
        for name in names:
            rename(directory / f".{name}.partial-{token}", directory / name)
        force_to_disk(directory)
    except OSError as error:
        raise CheckpointError(f"can't put {names} in place in {directory}: {error.strerror}") from error
    finally:
        for name in names:
            (directory / f".{name}.partial-{token}").unlink(missing_ok=True)


@contextlib.contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """Gives a path to write a file to; it is renamed to ``path`` when the context ends well."""
    _make_directory(path.parent)
    with _aside(path.parent) as pending:
        yield pending(path.name)


# ------------------------------------------------------------------------------------------------------------- reading


class Weights(Mapping[str, Tensor]):
    """Weights in files, read one by one when they are asked for, under all names they were saved from.

    A value may be a view of its file: it is to be copied from while the files are open, not to be kept.
    """

    def __init__(self, files: Mapping[str, TensorFile], aliases: Mapping[str, str]) -> None:
        self._files = files
        self._aliases = aliases

    def __getitem__(self, name: str) -> Tensor:
        name = self._aliases.get(name, name)
        return self._files[name].mapped(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        name = self._aliases.get(name, name)
        return self._files[name].shape(name)

    @property
    def aliases(self) -> Mapping[str, str]:
        """For each name that was left out the one its tensor is kept under."""
        return self._aliases

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._files) + len(self._aliases)


def is_there(directory: Path) -> bool:
    """Whether a directory has weights in the safetensors format."""
    return (directory / _SAFE.single).exists() or (directory / _SAFE.index).exists()


@contextlib.contextmanager
def open_weights(directory: Path) -> Iterator[Weights]:
    """Open the weights in a directory for the length of the context.

    Raises:
        CheckpointError: They are missing or damaged.
    """
    index = directory / _SAFE.index
    names = [_SAFE.single]
    if index.exists():
        with reading(index):
            names = sorted({_beside(name) for name in read_json(index)["weight_map"].values()})
    with contextlib.ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        aliases: dict[str, str] = {}
        for name in names:
            file = stack.enter_context(TensorFile.open(directory / name))
            files.update(dict.fromkeys(file.names, file))
            aliases.update(file.aliases)
        yield Weights(files, aliases)


def _beside(name: str) -> str:
    """The name of a file in the same directory. An index may come from anyone, and must not lead elsewhere."""
    if name in ("", ".", "..") or "/" in name or os.path.basename(name) != name:
        raise ValueError(f"it names the file {name!r}, which would be outside of its directory")
    return name
