"""What a class says of itself, read from the source of its module: importing a plugin may cost much, or fail."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

__all__ = ["first_line"]

_FARTHEST = 5
"""Modules through which a name is followed to the one that defines it."""


def first_line(value: str) -> str:
    """First line of the docstring of the class that an entry point names, without the marks around code.

    Empty if the source does not tell it.

    Args:
        value: ``module:Class``, of the entry point.
    """
    module, _, name = (part.strip() for part in value.partition(":"))
    for _ in range(_FARTHEST):
        path = _source(module)
        tree = None if path is None else _parse(path)
        if tree is None:
            return ""
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return (ast.get_docstring(node) or "").partition("\n")[0].replace("``", "")
        origin = _imported_from(tree, name, module, is_package=path is not None and path.name == "__init__.py")
        if origin is None:
            return ""
        module, name = origin
    return ""


def _source(module: str) -> Path | None:
    """The file of a module. Only the top package's place is asked of Python, which would import the parents of others.

    None if it is no file of Python source.
    """
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    for part in parts:
        folder = path.parent
        if path.name != "__init__.py":
            return None
        path = folder / part / "__init__.py"
        if not path.is_file():
            path = folder / f"{part}.py"
    return path if path.suffix == ".py" else None


@functools.cache
def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _imported_from(tree: ast.Module, name: str, module: str, *, is_package: bool) -> tuple[str, str] | None:
    """The module that a name is imported from at the top of another, and what it is called there."""
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return _absolute(node, module, is_package), alias.name
    return None


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if is_package else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])
