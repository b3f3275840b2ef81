"""Group *cost*: the hot path calls the plugins' own functions, with nothing in between."""

from __future__ import annotations

from typing import Any

from drivetrain.testing.conformance.checks import CheckList, expect
from drivetrain.testing.conformance.subject import Subject

__all__ = ["checks"]

checks = CheckList("cost")


def detours() -> list[str]:
    """Hot hooks that are bound to something else than the plugin's method, or core's default."""
    from drivetrain import defaults, hookspecs, state

    hooks = state.ensure().run.hooks
    found = []
    for name, info in hookspecs.hooks().items():
        if info.when != "hot":
            continue
        origins = hooks.owners(name)
        if info.all_called and len(origins) > 1:
            continue  # each is called in turn
        bound: Any = hooks.bind(name)
        own = getattr(defaults, name) if not origins else getattr(hooks.plugin(origins[0].role), name)
        # An implementation that takes fewer arguments is called through a generated function that names it.
        if bound != own and getattr(bound, "__wrapped__", None) != own:
            found.append(f"{name} is bound to {bound!r}")
    return found


@checks("hot hooks are bound to the plugin's own methods")
def direct(subject: Subject) -> None:
    for found in subject.run(detours):
        expect(found, [], "hot hooks with something in between")
