"""The conformance kit finds what is wrong with a plugin, by the check that is about it, and passes what is right."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing.conformance.checks import all_checks, matching
from drivetrain.testing.conformance.report import Outcome

Examine = Callable[..., Outcome]


@contextmanager
def importable() -> Iterator[Any]:
    """What the fixture makes known for good, for the length of the collection."""
    sys.path.insert(0, str(Path(__file__).parent))
    sys.conformance_test = True  # type: ignore[attr-defined]
    try:
        import broken_plugins

        for found in pkgutil.iter_modules(broken_plugins.__path__):
            importlib.import_module(f"broken_plugins.{found.name}")
        yield broken_plugins
    finally:
        del sys.conformance_test  # type: ignore[attr-defined]
        sys.path.remove(str(Path(__file__).parent))


with importable() as plugins:
    FAILURES = tuple(plugins.FAILURES)

NOBODY_FAILS = {
    "its requirements can be read, and are met here": "no such plugin is loaded at all",
    "norms that are not claimed are refused": "the core refuses them before it asks the plugin",
    "an optimizer of a model that was never prepared is refused on all ranks": "so it does with these",
    "hot hooks are bound to the plugin's own methods": "the core binds them; see test_a_detour_on_the_hot_path",
}
"""Checks that keep watch over the core, and why no plugin can fail them."""


def _case(failure: Any) -> Any:
    (check,) = matching(failure.check) or [None]
    launches = check is not None and (check.group == "launch" or check.name.startswith("fresh processes"))
    return pytest.param(failure, id=str(failure), marks=[pytest.mark.slow] if launches else [])


@pytest.mark.parametrize("failure", [_case(failure) for failure in FAILURES])
def test_a_plugin_that_is_wrong_fails_the_check_about_it(examine: Examine, failure: Any) -> None:
    role, name = failure.plugin.role, failure.plugin.__name__
    plugins = {"precision": failure.precision, role: name}
    outcome = examine(failure.check, failure.size, **plugins)
    assert outcome.status == "failed", outcome
    assert failure.reason in outcome.detail


def test_every_check_is_failed_by_some_plugin() -> None:
    failed = {failure.check for failure in FAILURES}
    never = {
        check.name
        for check in all_checks()
        if check.group != "precision" and not any(part in check.name for part in failed)
    }
    assert never == set(NOBODY_FAILS)
