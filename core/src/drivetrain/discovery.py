"""What is installed, read from the metadata of distributions. Imports no plugin, and neither torch nor pluggy.

A plugin is an entry point: its group says the role, its name is the name in the YAML, its value is ``module:Class``.
The metadata is read once per process.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from drivetrain.binding import Origin

__all__ = [
    "CORE",
    "EXPORTS",
    "EXTRAS",
    "GROUPS",
    "KEYWORDS",
    "TRACKERS",
    "Entry",
    "entries",
    "exports",
    "extra_roles",
    "extras",
    "keywords",
    "normalized",
    "problems",
    "refresh",
]

CORE = "drivetrain"
"""Name of the distribution that this package comes from."""

GROUPS: Mapping[str, str] = {
    "backend": "drivetrain.backends",
    "device": "drivetrain.devices",
    "precision": "drivetrain.precisions",
}
"""Entry-point group of each role of which a run has exactly one plugin."""
TRACKERS = "drivetrain.trackers"
"""Group of experiment trackers, of which a run may have any number."""
EXPORTS = "drivetrain.exports"
"""Group of public names that plugins add to ``import drivetrain``."""
KEYWORDS = "drivetrain.keywords"
"""Group of keywords that plugins add to ``Accelerator(...)``: keyword = the class its value is an instance of."""

EXTRAS = "drivetrain.extras"
"""Group in core's own metadata: extra = the role of the plugins that it brings, known before they are installed."""

_ROLES = {
    **{group: role for role, group in GROUPS.items()},
    TRACKERS: "tracker",
    EXPORTS: "export",
    KEYWORDS: "keyword",
    EXTRAS: "extra",
}


@attrs.frozen
class Entry:
    """One entry point of ours, as the metadata of its distribution states it."""

    role: str
    """``backend``, ``device``, ``precision``, ``tracker``, ``export``, ``keyword`` or ``extra``."""
    name: str
    value: str
    """What it names, ``module:attribute``; of an extra a role."""
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    """Requirements of its distribution (PEP 508)."""

    def __str__(self) -> str:
        return f"{self.role} {self.name!r} ({self.distribution} {self.version})"

    @property
    def qualified(self) -> str:
        """The name in full, which tells apart two distributions with the same name: ``distribution:name``."""
        return f"{self.distribution}:{self.name}"

    @property
    def origin(self) -> Origin:
        """The same facts as the hooks of a run want them."""
        from drivetrain.binding import Origin

        return Origin(role=self.role, name=self.name, distribution=self.distribution, version=self.version)


@attrs.frozen
class _Catalogue:
    """All entries by role and name, and what could not be read."""

    found: Mapping[str, Mapping[str, tuple[Entry, ...]]]
    problems: tuple[str, ...]


def entries() -> Mapping[str, Mapping[str, tuple[Entry, ...]]]:
    """Installed plugins: role -> name -> every provider of that name. More than one provider is a clash."""
    found = _catalogue().found
    return {role: found[role] for role in (*GROUPS, "tracker")}


def exports() -> Mapping[str, tuple[Entry, ...]]:
    """Public names that installed plugins add to the package."""
    return _catalogue().found["export"]


def keywords() -> Mapping[str, tuple[Entry, ...]]:
    """Keywords that installed plugins add to ``Accelerator(...)``."""
    return _catalogue().found["keyword"]


def extra_roles() -> Mapping[str, str]:
    """For those of core's extras that bring plugins: their role."""
    return {
        name: entry.value
        for name, providers in _catalogue().found["extra"].items()
        for entry in providers
        if normalized(entry.distribution) == CORE
    }


def problems() -> tuple[str, ...]:
    """One sentence for each distribution that offers plugins in metadata which can't be read."""
    return _catalogue().problems


@functools.cache
def extras() -> frozenset[str]:
    """Core's own extras, from its metadata. A name among them that isn't installed is ours, and has an install hint."""
    try:
        metadata = importlib.metadata.metadata(CORE)
    except importlib.metadata.PackageNotFoundError:
        return frozenset()
    return frozenset(metadata.get_all("Provides-Extra") or ())


def refresh() -> None:
    """Forget what was read, since a distribution has come or gone."""
    _catalogue.cache_clear()
    extras.cache_clear()


def normalized(distribution: str) -> str:
    """A distribution's name in the one spelling that compares equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    yield from importlib.metadata.distributions()


@functools.cache
def _catalogue() -> _Catalogue:
    found: dict[str, dict[str, tuple[Entry, ...]]] = {role: {} for role in _ROLES.values()}
    trouble: list[str] = []
    seen: set[str] = set()
    for distribution in _distributions():
        # Parsing one file too many is what makes discovery slow, or fail over somebody else's broken metadata.
        text = _entry_points_text(distribution)
        if f"[{CORE}." not in text:
            continue
        try:
            offered = _entries_of(distribution)
        except Exception as error:  # metadata is arbitrary text, and no reader of it promises what it raises
            trouble.append(f"plugins of {_location(distribution)} are ignored, its metadata can't be read: {error}")
            continue
        trouble.extend(_unknown_groups(distribution))
        if not offered or normalized(offered[0].distribution) in seen:
            continue  # a second copy further down sys.path, which import wouldn't find either
        seen.add(normalized(offered[0].distribution))
        for entry in offered:
            found[entry.role][entry.name] = (*found[entry.role].get(entry.name, ()), entry)
    return _Catalogue(found=found, problems=tuple(trouble))


def _entry_points_text(distribution: importlib.metadata.Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _location(distribution: importlib.metadata.Distribution) -> str:
    return str(getattr(distribution, "_path", distribution))


def _unknown_groups(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """A sentence for each group that looks like ours and isn't: its plugins would be missing without a word."""
    groups = {point.group for point in distribution.entry_points}
    for group in sorted(group for group in groups if group.startswith(f"{CORE}.") and group not in _ROLES):
        close = difflib.get_close_matches(group, _ROLES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(_ROLES)}"
        yield f"entry points of {_location(distribution)} are ignored: no group is called {group!r}{hint}"


def _entries_of(distribution: importlib.metadata.Distribution) -> list[Entry]:
    name, version = distribution.metadata["Name"], distribution.version
    if not name or not version:
        raise ValueError("it states no name or no version")
    requires = tuple(distribution.requires or ())
    return [
        Entry(
            role=_ROLES[point.group],
            name=point.name,
            value=point.value,
            distribution=name,
            version=version,
            requires=requires,
        )
        for point in distribution.entry_points
        if point.group in _ROLES
    ]
