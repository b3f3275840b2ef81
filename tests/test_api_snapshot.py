"""The contract as text, so that any change of it is seen in review.

After a change that was meant: ``python tests/test_api_snapshot.py`` writes the text anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from drivetrain import bundle, hookspecs, plugin, world

SNAPSHOT = Path(__file__).with_name("api_1.txt")


def render() -> str:
    """Every hook and every public class of the contract, one line a fact."""
    lines = [f"API {plugin.API[0]}.{plugin.API[1]}", "", "hooks"]
    for name, info in hookspecs.hooks().items():
        kind = "all called" if info.all_called else "one answer"
        lines.append(f"  {name}{render_signature(getattr(hookspecs.HookSpecs, name))}")
        lines.append(f"    {kind}; {', '.join(info.roles)}; {info.where}, {info.when}; returns: {info.returns}")
    for module in (plugin, world, bundle):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                lines += ["", f"class {module.__name__}.{name}", *render_class(thing)]
    return "\n".join(lines) + "\n"


def render_signature(function: Any) -> str:
    """Arguments and result as written; that there is a default counts, its value does not."""
    signature = inspect.signature(function)
    arguments = [
        name
        + ("" if parameter.annotation is parameter.empty else f": {parameter.annotation}")
        + ("" if parameter.default is parameter.empty else " = ...")
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    return f"({', '.join(arguments)}) -> {signature.return_annotation}"


def render_class(cls: type) -> Iterator[str]:
    """Fields, class attributes and public methods of a class's own."""
    if attrs.has(cls):
        for field in attrs.fields(cls):
            default = "" if field.default is attrs.NOTHING else " = ..."
            yield f"  {field.name}: {field.type}{default}"
    else:
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            yield f"  {name}: {annotation}"
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"  {'property ' if isinstance(member, property) else ''}{name}{render_signature(function)}"


def test_the_contract_is_as_written_down() -> None:
    assert render() == SNAPSHOT.read_text(), (
        "the contract changed; if that was meant, raise API's minor for an addition, its major for anything else, "
        "say so in CHANGELOG.md and run: python tests/test_api_snapshot.py"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(render())
