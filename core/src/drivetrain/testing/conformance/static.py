"""Group *static*: what can be said of a plugin's class without running anything of it."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from drivetrain import hookspecs
from drivetrain.binding import Hooks, Origin
from drivetrain.config import resolve
from drivetrain.errors import PluginError
from drivetrain.plugin import Check, Known, Plugin
from drivetrain.registry import Entry
from drivetrain.requirements import unmet
from drivetrain.testing.conformance.checks import CheckList, Violation, all_checks, expect
from drivetrain.testing.conformance.subject import Subject
from drivetrain.testing.process import worker_environment

__all__ = ["checks"]

checks = CheckList("static")

_IMPORT_LIMIT = 60


# -------------------------------------------------------------------------------------------------------- light import


@checks("the entry module imports neither torch nor the engine", where="no world")
def light(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        module = entry.value.partition(":")[0]
        engines = _packages_of(plugin.requires) | {"torch"}
        brought = _imported_by(module) & engines
        if brought:
            raise Violation(
                f"importing {module}, the entry of {entry}, imports {', '.join(sorted(brought))}; import it inside of "
                f"the hooks, so that listing, checking and choosing plugins costs nothing"
            )


def _imported_by(module: str) -> set[str]:
    """Top-level packages that importing a module brings, beyond those the core's own bases bring."""
    code = (
        "import sys, drivetrain.plugin\nbefore = set(sys.modules)\n"
        f"import {module}\nprint('\\n' + ' '.join({{name.partition('.')[0] for name in set(sys.modules) - before}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_LIMIT, env=worker_environment({})
    )
    if done.returncode != 0:
        raise Violation(f"importing {module} in a fresh process fails:\n{done.stderr.strip()[-2000:]}")
    return set(done.stdout.splitlines()[-1].split())


def _packages_of(requires: tuple[str, ...]) -> set[str]:
    """Top-level packages of the distributions that a plugin names as its engine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names = {canonicalize_name(Requirement(text).name) for text in requires}
    found = importlib.metadata.packages_distributions()
    return {package for package, owners in found.items() if names & {canonicalize_name(owner) for owner in owners}}


# ----------------------------------------------------------------------------------------------------- the class itself


@checks("the API version is a literal in the class body", where="no world")
def api(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        if "api" not in vars(plugin):
            raise Violation(
                f"{plugin.__qualname__} of {entry} inherits api from a base; write the version it was made for into "
                f"the class, such as api = (1, 0)"
            )
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(plugin)))
        except (OSError, TypeError):
            continue  # there is no source, as in a compiled module
        if not any(_is_literal_api(node) for node in ast.iter_child_nodes(tree.body[0])):
            raise Violation(
                f"{plugin.__qualname__}.api of {entry} is computed; write a literal, such as api = (1, 0): a version "
                f"taken from the core would always fit"
            )


def _is_literal_api(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if not any(isinstance(target, ast.Name) and target.id == "api" for target in targets):
        return False
    value: Any = node.value  # type: ignore[attr-defined]
    return isinstance(value, ast.Tuple) and all(isinstance(part, ast.Constant) for part in value.elts)


@checks("the class says in a sentence what it is", where="no world")
def documented(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        if not (vars(plugin).get("__doc__") or "").strip():
            raise Violation(f"{plugin.__qualname__} of {entry} has no docstring; `drivetrain plugins -v` shows it")


@checks("an instance is hashable, equals no other, and keeps to the rules of hooks", where="no world")
def registers(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        try:
            Hooks(object()).register(plugin(), Origin(entry.role, entry.name, entry.distribution, entry.version))
        except PluginError as error:
            raise Violation(str(error)) from error
        if plugin() == plugin():
            raise Violation(f"two instances of {plugin.__qualname__} are equal; if it is an attrs class, use eq=False")


@checks("its requirements can be read, and are met here", where="no world")
def requirements(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        if not isinstance(plugin.requires, tuple):
            raise Violation(f"{plugin.__qualname__}.requires of {entry} must be a tuple, not {plugin.requires!r}")
        missing = unmet(plugin.requires)
        if missing:
            raise Violation(f"{entry}: {'; '.join(missing)}")


@checks("hooks it implements are those of its role", where="no world")
def roles(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        for name, info in hookspecs.hooks().items():
            if hasattr(getattr(plugin, name, None), "drivetrain_impl") and entry.role not in info.roles:
                raise Violation(f"{plugin.__qualname__}.{name}: a {entry.role} can't implement this hook")


# ------------------------------------------------------------------------------------------------------ configuration


@checks("its section can be left out, and its defaults can be written down and read back", where="no world")
def round_trip(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        empty = _section(entry, plugin, {}, subject.folder)
        written = json.loads(json.dumps(attrs.asdict(empty), default=_plain))
        again = _section(entry, plugin, written, subject.folder)
        if again != empty:
            raise Violation(
                f"{plugin.Config.__qualname__} of {entry}: defaults written as {written} are read back as {again!r}, "
                f"not as {empty!r}"
            )


def _section(entry: Entry, plugin: type[Plugin], values: dict[str, Any], folder: Path) -> Any:
    path = folder / "section.yaml"
    path.write_text(json.dumps({entry.name: values}))
    try:
        return resolve(path, command_line={}, environment={}).section(entry.name, plugin.Config)
    except Exception as error:
        what = "an empty section" if not values else f"the defaults, written as {values},"
        raise Violation(f"{plugin.Config.__qualname__} of {entry} can't be built from {what}: {error}") from error


def _plain(value: Any) -> Any:
    """Values as YAML has them: members of an enumeration by value, sets as lists, paths as text."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", str(value))


@checks("every setting has a default and a help text", where="no world")
def settings(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        for path, field in _fields(plugin.Config, entry.name):
            if field.default is attrs.NOTHING:
                raise Violation(f"setting {path} has no default, so the section can't be left out")
            if not str(field.metadata.get("help", "")).strip():
                raise Violation(f"setting {path} has no help; add metadata={{'help': '...'}} to the field")


def _fields(config: type, path: str) -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """Every field, those of sections inside of it too."""
    attrs.resolve_types(config)
    for field in attrs.fields(config):
        yield f"{path}.{field.name}", field
        if isinstance(field.type, type) and attrs.has(field.type):
            yield from _fields(field.type, f"{path}.{field.name}")


# ------------------------------------------------------------------------------------------------- checks and known


def rows(role: str, name: str) -> list[str]:
    """What is wrong with the rows that a plugin's ``checks`` gives, as ``drivetrain doctor`` would find."""
    from drivetrain import registry

    plugin = registry.load(registry.find(role, name))
    found = list(plugin.checks())
    wrong = [repr(row) for row in found if not isinstance(row, Check) or row.ok not in (True, False, None)]
    if len(found) != len(list(plugin.checks())):
        wrong.append(f"{len(found)} rows the first time, and another number the second time")
    return wrong


@checks("checks() never raises, and gives rows for the doctor", where="no world")
def doctor_rows(subject: Subject) -> None:
    for entry, plugin in subject.plugins:
        try:
            wrong = subject.pool.run(rows, entry.role, entry.qualified, size=1)[0]
        except Exception as error:
            raise Violation(f"{plugin.__qualname__}.checks() of {entry} raises: {_first_line(error)}") from error
        expect(wrong, [], f"rows of {plugin.__qualname__}.checks() that are no drivetrain.plugin.Check")


def _first_line(error: Exception) -> str:
    errors: Any = getattr(error, "errors", ())
    return f"{errors[0].type}: {errors[0].message}" if errors else str(error)


@checks("every known defect names a check of the kit and a reason", where="no world")
def known(subject: Subject) -> None:
    names = {check.name for check in all_checks()}
    for entry, plugin in subject.plugins:
        for one in plugin.known:
            if not isinstance(one, Known) or one.check not in names or not one.reason.strip():
                raise Violation(
                    f"{plugin.__qualname__}.known of {entry}: {one!r} names no check of the kit, or no reason"
                )
