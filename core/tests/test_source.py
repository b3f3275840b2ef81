"""What a plugin's class says of itself, told without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drivetrain import discovery, registry
from drivetrain.cli.source import first_line, requirements


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that can't be imported, whose class is defined two modules further."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "told_from_source"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("from told_from_source.inner import Kept as Renamed\nraise RuntimeError\n")
    (folder / "inner" / "__init__.py").write_text("from .deepest import Kept\nfrom ..beside import Other\n")
    (folder / "inner" / "deepest.py").write_text('class Kept:\n    """Does it all.\n\n    Slowly.\n    """\n')
    (folder / "beside.py").write_text('class Other:\n    """Does the rest."""\nclass Silent: pass\n')
    return folder


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("told_from_source:Renamed", "Does it all."),
        ("told_from_source.inner:Other", "Does the rest."),
        ("told_from_source.beside : Other", "Does the rest."),
        ("told_from_source.beside:Silent", ""),
        ("told_from_source.beside:Nobody", ""),
        ("told_from_source.nowhere:Other", ""),
        ("told_from_source.beside.inner:Other", ""),
        ("no_package_of_this_name:Other", ""),
        ("sys:Other", ""),
        ("told_from_source", ""),
        ("", ""),
    ],
)
def test_the_first_line_is_followed_to_where_the_class_is_defined(package: Path, value: str, line: str) -> None:
    assert first_line(value) == line
    assert not any(name.startswith("told_from_source") for name in sys.modules)


def test_source_that_is_broken_or_goes_in_circles_tells_nothing(package: Path) -> None:
    (package / "broken.py").write_text("class :")
    (package / "circle.py").write_text("from told_from_source.circle import Kept\n")
    assert first_line("told_from_source.broken:Kept") == first_line("told_from_source.circle:Kept") == ""


def test_every_plugin_installed_here_is_described_by_its_own_words() -> None:
    entries = [one for names in discovery.entries().values() for each in names.values() for one in each]
    lines = {str(entry): first_line(entry.value) for entry in entries}
    assert all(lines.values()), lines
    assert len(set(lines.values())) == len(lines), lines


# ------------------------------------------------------------------------------------------------------- requirements

ASKING = """
from drivetrain.plugin import *
from drivetrain.plugin import Backend as Renamed
from told_from_source.nowhere import Stranger

MORE = ("one>=1", "two")

class Plain(Renamed): pass
class Own(Backend): requires = ("engine>=2",)
class Heir(Own): pass
class Adding(Own): requires = (*Own.requires, "second")
class Quiet(Own): requires = ()
class Named(Backend): requires = MORE
class Annotated(Backend): requires: tuple = ("engine",)
class Mixed(Plain, Own): pass
class Strange(Stranger): pass
class Computed(Backend): requires = tuple(x for x in MORE)
class Text(Backend): requires = "engine"
class Circle(Circle): pass
"""


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("Plain", ()),
        ("Own", ("engine>=2",)),
        ("Heir", ("engine>=2",)),
        ("Adding", ("engine>=2", "second")),
        ("Quiet", ()),
        ("Named", ("one>=1", "two")),
        ("Annotated", ("engine",)),
        ("Mixed", ("engine>=2",)),
        ("Strange", None),
        ("Computed", None),
        ("Text", None),
        ("Circle", None),
        ("Nobody", None),
    ],
)
def test_what_a_class_requires_is_read_where_it_can_be(
    package: Path, name: str, required: tuple[str, ...] | None
) -> None:
    (package / "asking.py").write_text(ASKING)
    assert requirements(f"told_from_source.asking:{name}") == required
    assert not any(module.startswith("told_from_source") for module in sys.modules)


def test_what_every_plugin_installed_here_requires_is_read_as_its_class_has_it() -> None:
    entries = [one for names in discovery.entries().values() for each in names.values() for one in each]
    assert {str(entry): requirements(entry.value) for entry in entries} == {
        str(entry): registry.describe(entry).requires for entry in entries
    }
