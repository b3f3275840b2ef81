"""Write ``hooks.md``, the reference of all hooks, from their specifications: ``python docs/generate_hooks.py``.

A test sees to it that the page is current.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from drivetrain import hookspecs
from drivetrain.hookspecs import HookInfo, HookSpecs
from drivetrain.plugin import API

PAGE = Path(__file__).with_name("hooks.md")

_HEAD = f"""\
<!-- Written by docs/generate_hooks.py from core/src/drivetrain/hookspecs.py; change that, then run it again. -->

# Hooks

Every hook of the plugin contract, API {API[0]}.{API[1]}, in the order in which a run meets them. How they are used, and
how a plugin is written: [plugins.md](plugins.md).

A plugin implements only those in which it differs from core's default, marks each with `@hookimpl`, and takes only the
arguments that it needs, by their names and in any order. `run` is the run (`drivetrain.world.Run`): its configuration,
world, policy, capabilities, and `run.hooks`, by which a hook calls any other as core would. A default can be called
from a plugin: `drivetrain.defaults.NAME`, with all arguments of the hook in the order given here.

*One answer*: of the roles named, the first whose plugin implements the hook answers it, else core's default; it is
never followed by another. *All called*: every plugin that implements it is called: backend, precision, device.
*Hot* hooks are resolved once and then called directly, so that they cost what a method call costs.
"""

_WHEN = {"once": "once in a run", "prepare": "at `prepare`", "hot": "hot", "call": "when it is called for"}
_WHERE = {"launcher": "in the launcher", "worker": "in each process of the run"}


def render() -> str:
    """The whole page."""
    parts = [_HEAD, _table()]
    chapters = _chapters()
    for name, info in hookspecs.hooks().items():
        if name in chapters:
            parts.append(chapters[name])
        parts.append(_hook(info))
    return "\n".join(parts)


def _table() -> str:
    rows = [f"| [`{info.name}`](#{info.name}) | {_roles(info)} | {_WHEN[info.when]} |" for info in _infos()]
    return "\n".join(["| hook | roles | called |", "|---|---|---|", *rows, ""])


def _infos() -> list[HookInfo]:
    return list(hookspecs.hooks().values())


def _roles(info: HookInfo) -> str:
    return ", ".join(info.roles)


def _hook(info: HookInfo) -> str:
    function = getattr(HookSpecs, info.name)
    kind = "all called" if info.all_called else "one answer"
    facts = f"*{_roles(info)} · {_WHERE[info.where]} · {_WHEN[info.when]} · {kind}*"
    return "\n".join(
        [
            f"### `{info.name}`",
            "",
            "```python",
            _signature(function, info.name),
            "```",
            "",
            facts,
            "",
            _text(function),
            "",
        ]
    )


def _signature(function: object, name: str) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    arguments = [f"{key}: {value.annotation}" for key, value in signature.parameters.items() if key != "self"]
    line = f"{name}({', '.join(arguments)}) -> {signature.return_annotation}"
    if len(line) <= 100:
        return line
    return "\n".join(
        [f"{name}(", *(f"    {argument}," for argument in arguments), f") -> {signature.return_annotation}"]
    )


def _text(function: object) -> str:
    """A docstring as Markdown: its paragraphs, and its arguments as a list."""
    prose, *arguments = re.split(r"^:param (\w+):", inspect.getdoc(function) or "", flags=re.MULTILINE)
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    listed = [f"* `{name}`: {' '.join(text.split())}" for name, text in pairs]
    return _markdown("\n\n".join(part for part in (prose.strip(), "\n".join(listed)) if part))


def _markdown(text: str) -> str:
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text.replace("``", "`"))


def _chapters() -> dict[str, str]:
    """Headings, by the hook they stand before: the lines of dashes in the source, with the comment below them."""
    found: dict[str, str] = {}  # numbered, since a chapter and a hook in it may have the same name
    heading: list[str] = []
    for line in inspect.getsource(HookSpecs).splitlines():
        banner = re.fullmatch(r"\s*# -{3,} (.+)", line)
        comment = re.fullmatch(r"\s*# (.+)", line)
        hook = re.match(r"\s*def (\w+)\(", line)
        if banner:
            heading = [banner[1]]
        elif comment and heading:
            heading.append(comment[1])
        elif hook and heading:
            found[hook[1]] = "\n".join(_chapter(len(found) + 1, heading))
            heading = []
    return found


def _chapter(number: int, lines: list[str]) -> Iterator[str]:
    title, *more = lines
    if more:  # what follows a colon in the title belongs to the sentence below
        title, colon, begin = title.partition(": ")
        more = [begin, *more] if colon else more
    yield f"## {number}. {title[0].upper()}{title[1:]}\n"
    if more:
        text = " ".join(more)
        yield _markdown(f"{text[0].upper()}{text[1:]}\n")


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
