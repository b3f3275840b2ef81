"""Messages over pipes: eight bytes of length, then the content."""

from __future__ import annotations

from typing import IO

__all__ = ["receive", "send"]


def send(pipe: IO[bytes], content: bytes) -> None:
    """Write one message."""
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read one message.

    Raises:
        EOFError: The other side is gone.
    """
    return _exactly(pipe, int.from_bytes(_exactly(pipe, 8), "little"))


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = pipe.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
