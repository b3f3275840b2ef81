"""The files of a checkpoint: written with a checksum and forced to the disk, read with errors that name the file."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs

from drivetrain.errors import CheckpointError

__all__ = [
    "FileRecord",
    "FileWriter",
    "checksum",
    "checksums",
    "create",
    "force_to_disk",
    "journal",
    "read_json",
    "reading",
    "rename",
    "write_json",
]

_CHUNK = 1 << 22
_READ = 1 << 18
"""Bytes that are read at once for a checksum: what a processor keeps at hand."""
_READERS = 4
_FLUSHED = 1 << 26
"""Bytes after which the disk is set to work on a file that is still being written."""


@attrs.frozen
class FileRecord:
    """What a manifest knows of a file."""

    size: int = attrs.field(validator=attrs.validators.instance_of(int))
    """Bytes."""
    crc32: str = attrs.field(validator=attrs.validators.instance_of(str))
    """Eight hexadecimal digits. Against accidents, not against people."""


# What the files written in this context are noted in. Hooks write files too and have no way to return their records.
_journal: ContextVar[dict[Path, FileRecord] | None] = ContextVar("drivetrain_checkpoint_journal", default=None)


@contextlib.contextmanager
def journal() -> Iterator[dict[Path, FileRecord]]:
    """Context that notes size and checksum of every file written in it through this module."""
    records: dict[Path, FileRecord] = {}
    token = _journal.set(records)
    try:
        yield records
    finally:
        _journal.reset(token)


class FileWriter:
    """Writes a file. On the way, threads compute its checksum and have the disk take what is there, which else would
    begin when all is written.

    Args:
        file: Open for writing, in binary.
        hasher: One thread, since a checksum goes on where it was.
        disk: Another one.
    """

    def __init__(self, file: Any, hasher: ThreadPoolExecutor, disk: ThreadPoolExecutor) -> None:
        self._file = file
        self._hasher = hasher
        self._disk = disk
        self._flushing: Future[None] | None = None
        self._flushed = 0
        self._pending: deque[Future[None]] = deque()
        self._crc = 0
        self.size = 0

    def write(self, data: Any) -> None:
        """Append the bytes of a buffer, which must not change until the file is closed."""
        view = memoryview(data)
        if not view.nbytes:
            return  # a memoryview of no elements can't be cast
        view = view.cast("B")
        self._pending.append(self._hasher.submit(self._add, view))
        if len(self._pending) > 2:  # each keeps its data alive, which may be a copy that came from a device
            self._pending.popleft().result()
        for start in range(0, view.nbytes, _CHUNK):
            self._file.write(view[start : start + _CHUNK])
        self.size += view.nbytes
        if self.size - self._flushed >= _FLUSHED and (self._flushing is None or self._flushing.done()):
            self._check_flushed()
            self._flushed = self.size
            self._flushing = self._disk.submit(os.fsync, self._file.fileno())

    def _check_flushed(self) -> None:
        """Raise what the disk had to say: the system tells an error of a file once, not again when it is closed."""
        if self._flushing is not None:
            self._flushing.result()

    def _add(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)

    def finish(self) -> FileRecord:
        """Wait for the checksum and the disk."""
        self._check_flushed()
        while self._pending:
            self._pending.popleft().result()
        return FileRecord(self.size, f"{self._crc:08x}")


@contextlib.contextmanager
def create(path: Path) -> Iterator[FileWriter]:
    """Create a file and leave it whole and on the disk.

    Raises:
        CheckpointError: It can't be written; the text names the path and the system's reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            ThreadPoolExecutor(1, "checksum") as hasher,
            path.open("wb") as file,
            ThreadPoolExecutor(1, "disk") as disk,
        ):
            writer = FileWriter(file, hasher, disk)
            yield writer
            file.flush()
            os.fsync(file.fileno())
            record = writer.finish()
    except OSError as error:
        raise CheckpointError(f"can't write {path}: {error.strerror or error}") from error
    records = _journal.get()
    if records is not None:
        records[path] = record


def rename(old: Path, new: Path) -> None:
    """Give a file another name, in place of what has it."""
    os.replace(old, new)
    records = _journal.get()
    if records is not None and old in records:
        records[new] = records.pop(old)


def write_json(path: Path, data: Any, indent: int | None = None) -> None:
    """Write plain data as JSON; the same data gives the same bytes."""
    with create(path) as file:
        file.write(json.dumps(data, allow_nan=False, indent=indent).encode("ascii"))


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: The file is missing, unreadable or damaged.
    """
    with reading(path):
        return json.loads(path.read_bytes())


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context in which errors of reading ``path`` become ones that name it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # json's own is a ValueError
        raise CheckpointError(f"{path} is damaged: {error}") from error


def checksum(path: Path) -> FileRecord:
    """Size and checksum of a file, from reading all of it."""
    crc, size = 0, 0
    buffer = memoryview(bytearray(_READ))
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return FileRecord(size, f"{crc:08x}")


def checksums(paths: Sequence[Path]) -> list[FileRecord]:
    """Sizes and checksums of files, several at a time: a processor is slower at it than at reading."""
    with ThreadPoolExecutor(_READERS, "checksum") as pool:
        return list(pool.map(checksum, paths))


def force_to_disk(path: Path) -> None:
    """Have the system write a file, or the names in a directory, before this returns."""
    if path.is_dir() and os.name != "posix":
        return  # elsewhere directories can't be opened, and need not be
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
