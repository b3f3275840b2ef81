"""The packages that ``drivetrain new-plugin`` writes: files with placeholders, those of all roles and those of each.

A file's path here is its path there, but that ``.tmpl`` falls off, a ``dot_`` in front of a name becomes a dot, and
``package`` becomes the name of the plugin's package. None of them is called ``.py``: they are no modules of core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["render"]

_SUFFIX = ".tmpl"


def render(role: str, values: Mapping[str, str]) -> dict[str, str]:
    """The files of a plugin's package: text by path, with slashes, below the package's own folder.

    Args:
        role: A key of ``drivetrain.discovery.GROUPS``.
        values: For every placeholder; ``package`` is the name of the import package.

    Raises:
        KeyError: A placeholder has no value.
    """
    root = files(__package__)
    found = [*_walk(root / "common", ()), *_walk(root / role, ())]
    return {_target(path, values): Template(source.read_text("utf-8")).substitute(values) for path, source in found}


def _walk(folder: Traversable, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    """Every template below a folder, and the names on the way to it. What an editor or Python left there is none."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from _walk(item, (*path, item.name))
        elif item.name.endswith(_SUFFIX):
            yield (*path, item.name.removesuffix(_SUFFIX)), item


def _target(path: tuple[str, ...], values: Mapping[str, str]) -> str:
    def name(part: str) -> str:
        if part == "package":
            return values["package"]
        return "." + part.removeprefix("dot_") if part.startswith("dot_") else part

    return "/".join(map(name, path))
