"""Names of the ways in which processes work together, as scripts compare them."""

from __future__ import annotations

__all__ = ["DistributedType"]


class _Open(type):
    """Gives the class every name in capitals, since plugins report names that nobody here can list."""

    def __getattr__(cls, name: str) -> DistributedType:
        if name.startswith("_") or not name.isupper():
            raise AttributeError(
                f"{name!r} is no distributed type: they are names in capitals, such as {DistributedType('NO')!r}"
            )
        return DistributedType(name)


class DistributedType(str, metaclass=_Open):
    """A distributed type: the text a backend reports, also reachable as an attribute of this class.

    ``accelerator.distributed_type == DistributedType.NO`` asks whether one process works alone. Every backend reports a
    name of its own; the class is open, so that a script may ask for a backend that is not installed.
    """

    @property
    def value(self) -> str:
        """The plain text."""
        return str(self)

    name = value

    def __repr__(self) -> str:
        return f"DistributedType.{self!s}"
