"""``drivetrain plugins``: what is installed, read from metadata and from source that is not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from drivetrain.cli.options import json_option, option

if TYPE_CHECKING:
    from drivetrain.discovery import Entry

__all__ = ["plugins"]

_FACTS = ("role", "name", "distribution", "version", "entry", "description")


@click.command()
@json_option
@option("--verbose", "-v", is_flag=True, help="Import each plugin, and show what it says of itself or why it can't.")
def plugins(as_json: bool, verbose: bool) -> None:
    """List installed backends, devices, precisions and trackers. Imports none of them, unless --verbose.

    With --json, where each is found, too.
    """
    from drivetrain import discovery

    describe = _own_words if verbose else _summary
    rows = [
        (role, entry.name, entry.distribution, entry.version, entry.value, describe(entry))
        for role, names in discovery.entries().items()
        for name in sorted(names)
        for entry in names[name]
    ]
    if as_json:
        import json

        click.echo(json.dumps([dict(zip(_FACTS, row, strict=True)) for row in rows], indent=2))
    else:
        from drivetrain.cli.output import print_table

        cells = [(role, name, f"{owner} {version}", about) for role, name, owner, version, _, about in rows]
        print_table(("role", "name", "distribution", "description"), cells, prose=True)
    for problem in discovery.problems():
        click.echo(f"Warning: {problem}", err=True)


def _summary(entry: Entry) -> str:
    """First line of the class's docstring as its source has it, else the summary of its distribution."""
    import importlib.metadata

    from drivetrain.cli.docstrings import first_line

    return first_line(entry.value) or next(
        iter(importlib.metadata.metadata(entry.distribution).get_all("Summary") or ()), ""
    )


def _own_words(entry: Entry) -> str:
    """First line of the class's docstring, or why there is no class."""
    from drivetrain import registry
    from drivetrain.errors import PluginError

    try:
        found = registry.load(entry)
    except PluginError as error:
        return f"BROKEN: {error}"
    return (found.__doc__ or "").strip().partition("\n")[0]
