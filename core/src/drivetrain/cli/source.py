"""What a plugin's class says of itself, read from the source of its module: importing it may cost much, or fail."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import attrs

__all__ = ["first_line", "requirements"]

_FARTHEST = 5
"""Modules through which a name is followed to the one that defines it, and classes to the one that says something."""


@attrs.frozen
class _Module:
    """A module's source."""

    name: str
    tree: ast.Module
    is_package: bool


@attrs.frozen
class _Class:
    """A class, and the module in which the names that it uses have their meaning."""

    node: ast.ClassDef
    module: _Module


def first_line(value: str) -> str:
    """First line of the docstring of the class that an entry point names, without the marks around code.

    Empty if the source does not tell it.

    Args:
        value: ``module:Class``, of the entry point.
    """
    found = _entry_class(value)
    return "" if found is None else (ast.get_docstring(found.node) or "").partition("\n")[0].replace("``", "")


def requirements(value: str) -> tuple[str, ...] | None:
    """What the class that an entry point names ``requires`` of its engine; None if the source does not tell it.

    Understood are texts in brackets, names of such, and the ``requires`` of other classes, also inherited.

    Args:
        value: ``module:Class``, of the entry point.
    """
    found = _entry_class(value)
    return None if found is None else _requires(found, _FARTHEST)


# -------------------------------------------------------------------------------------------------- from name to class


def _entry_class(value: str) -> _Class | None:
    module, _, name = (part.strip() for part in value.partition(":"))
    return _find(module, name, _FARTHEST)


def _find(module: str, name: str, steps: int) -> _Class | None:
    """The class that a module knows by a name, wherever it is defined."""
    found = _read(module) if steps else None
    if found is None:
        return None
    for node in found.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _Class(node, found)
    origins = (_find(origin, original, steps - 1) for origin, original in _imported_from(found, name))
    return next((origin for origin in origins if origin is not None), None)


def _read(module: str) -> _Module | None:
    path = _source(module)
    tree = None if path is None else _parse(path)
    return None if path is None or tree is None else _Module(module, tree, path.name == "__init__.py")


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


def _imported_from(module: _Module, name: str) -> Iterator[tuple[str, str]]:
    """Modules that a name may be imported from at the top of another, and what it is called there."""
    for node in module.tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                yield _absolute(node, module), alias.name
            elif alias.name == "*":
                yield _absolute(node, module), name


def _absolute(node: ast.ImportFrom, module: _Module) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


# --------------------------------------------------------------------------------------------- what a class has said


def _requires(found: _Class, steps: int) -> tuple[str, ...] | None:
    """``requires`` of a class, its own or inherited; None if that can't be told."""
    stated = _assigned(found.node.body, "requires")
    if stated is not None:
        return _texts(stated, found.module, steps)
    inherited = [_requires_of(base, found.module, steps) for base in found.node.bases]
    if None in inherited:
        return None
    return next(filter(None, inherited), ())  # what asks for nothing is the base of all, and others come before it


def _requires_of(expression: ast.expr, module: _Module, steps: int) -> tuple[str, ...] | None:
    """``requires`` of the class that an expression in a module means."""
    name = expression.id if isinstance(expression, ast.Name) else ""
    if name == "object":
        return ()
    other = _find(module.name, name, _FARTHEST) if steps else None
    return None if other is None else _requires(other, steps - 1)


def _assigned(body: list[ast.stmt], name: str) -> ast.expr | None:
    """What stands behind ``name =`` in the body of a class or module."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return getattr(node, "value", None)
    return None


def _texts(expression: ast.expr, module: _Module, steps: int) -> tuple[str, ...] | None:
    """The texts that an expression in a module means."""
    if isinstance(expression, (ast.Tuple, ast.List)):
        parts = [_item(item, module, steps) for item in expression.elts]
        return None if None in parts else tuple(text for part in parts for text in part or ())
    if isinstance(expression, ast.Attribute) and expression.attr == "requires":
        return _requires_of(expression.value, module, steps)
    if isinstance(expression, ast.Name):
        meant = _assigned(module.tree.body, expression.id)
        return None if meant is None or not steps else _texts(meant, module, steps - 1)
    return None


def _item(item: ast.expr, module: _Module, steps: int) -> tuple[str, ...] | None:
    if isinstance(item, ast.Starred):
        return _texts(item.value, module, steps)
    return (item.value,) if isinstance(item, ast.Constant) and isinstance(item.value, str) else None
