"""Whether what a plugin requires is installed in a fitting version, told by metadata before anything is imported.

``packaging`` is imported where it is used: it takes longer than all of this package, and many runs never ask.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from drivetrain.discovery import CORE, extra_roles, extras, normalized

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["installed_version", "installed_versions", "members", "plugin_extras", "unmet"]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str], extra: str = "") -> list[str]:
    """What is wrong with the installed distributions, one phrase for each requirement they don't fulfil.

    Requirements whose marker does not apply here are left out. Those of an extra that a requirement asks for
    (``engine[gpu]``) are checked too.

    Args:
        requirements: Requirements as PEP 508 writes them.
        extra: The extra for which they are asked; what only other extras want is left out.
    """
    return _unmet(requirements, extra, frozenset())


def installed_versions(requirements: Iterable[str]) -> list[str]:
    """What is installed of the distributions that requirements name and that are wanted here, such as ``torch 2.13.0``.

    Args:
        requirements: As PEP 508 writes them, none of them ``unmet``.
    """
    from packaging.requirements import Requirement

    wanted = [requirement for requirement in map(Requirement, requirements) if _applies(requirement, "")]
    return [f"{requirement.name} {installed_version(requirement.name)}" for requirement in wanted]


def _unmet(requirements: Iterable[str], extra: str, visited: frozenset[tuple[str, str]]) -> list[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    phrases = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            phrases.append(f"states the requirement {text!r}, which is none: {str(error).splitlines()[0]}")
            continue
        if _applies(requirement, extra):
            phrases.extend(_verdict(requirement, visited))
    return phrases


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _verdict(requirement: Requirement, visited: frozenset[tuple[str, str]]) -> list[str]:
    from packaging.version import InvalidVersion

    wanted = str(requirement).split(";")[0].strip()
    version = installed_version(requirement.name)
    if version is None:
        return [f"needs {wanted}, which is not installed"]
    try:
        fits = requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:  # of older releases of packaging; newer ones say that it doesn't fit
        fits = False
    if not fits:
        return [f"needs {wanted}, but {version} is installed"]
    phrases: list[str] = []
    for extra in sorted(requirement.extras):
        step = (normalized(requirement.name), extra)
        if step not in visited:
            inner = [text for text in importlib.metadata.requires(requirement.name) or () if _only_for(text, extra)]
            phrases.extend(_unmet(inner, extra, visited | {step}))
    return phrases


def _only_for(text: str, extra: str) -> bool:
    """Whether a distribution has this requirement with an extra, and not without."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    return _applies(requirement, extra) and not _applies(requirement, "")


def members() -> list[str]:
    """Distributions of ours that core's metadata names, installed or not. They are released together with core."""
    return sorted({normalized(requirement.name) for requirement in _required_members()})


def plugin_extras(role: str) -> list[str]:
    """Those of core's extras that bring a distribution of ours with plugins of a role: what an install hint may offer.

    Args:
        role: ``backend``, ``device``, ``precision`` or ``tracker``.
    """
    required, roles = _required_members(), extra_roles()
    return [
        extra
        for extra in sorted(extras())
        if roles.get(extra) == role
        and any(_applies(requirement, extra) and not _applies(requirement, "") for requirement in required)
    ]


def _required_members() -> list[Requirement]:
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(CORE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [found for found in map(Requirement, texts) if normalized(found.name).startswith(f"{CORE}-")]
