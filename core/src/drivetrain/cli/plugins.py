"""``drivetrain plugins``: what is installed, read from metadata and from source that is not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import click

from drivetrain.cli.options import json_option, option

if TYPE_CHECKING:
    from drivetrain.discovery import Entry

__all__ = ["plugins"]


@attrs.frozen
class _Words:
    """What a plugin says of itself."""

    description: str
    requires: tuple[str, ...] = ()
    """Of its engine."""
    told: bool = True
    """Whether it says what it requires where that could be read."""


@click.command()
@json_option
@option("--verbose", "-v", is_flag=True, help="Import each plugin, and show what it says of itself or why it can't.")
def plugins(as_json: bool, verbose: bool) -> None:
    """List installed backends, devices, precisions and trackers. Imports none of them, unless --verbose.

    Also whether the engine that a plugin drives is installed in a version that fits, told without importing it. With
    --json, where each is found, too.
    """
    from drivetrain import discovery
    from drivetrain.cli.output import stdout_kept_clean

    installed = discovery.entries().values()
    entries = [entry for names in installed for name in sorted(names) for entry in names[name]]
    with stdout_kept_clean():
        told = [(entry, _own_words(entry) if verbose else _words_in_source(entry)) for entry in entries]
    if as_json:
        import json

        click.echo(json.dumps([_facts(entry, words) for entry, words in told], indent=2))
    else:
        from drivetrain.cli.output import print_table

        cells = [
            (entry.role, entry.name, f"{entry.distribution} {entry.version}", "\n".join(_about(entry, words)))
            for entry, words in told
        ]
        print_table(("role", "name", "distribution", "description"), cells, prose=True)
    for problem in discovery.problems():
        click.echo(f"Warning: {problem}", err=True)


def _facts(entry: Entry, words: _Words) -> dict[str, object]:
    return {
        "role": entry.role,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "entry": entry.value,
        "description": words.description,
        "requires": words.requires if words.told else None,
        "unmet": _unmet(entry, words),
    }


def _about(entry: Entry, words: _Words) -> list[str]:
    """Lines of a table's cell: what it is, and what is there of its engine."""
    from drivetrain.requirements import installed_versions

    if missing := _unmet(entry, words):
        return [words.description, f"engine: {'; '.join(missing)}"]
    if words.requires:
        return [words.description, f"engine: {', '.join(installed_versions(words.requires))}"]
    return [words.description] if words.told else [words.description, "engine: not known; --verbose asks the plugin"]


def _unmet(entry: Entry, words: _Words) -> list[str]:
    from drivetrain.requirements import unmet

    return list(dict.fromkeys([*unmet(entry.requires), *unmet(words.requires or ())]))


def _words_in_source(entry: Entry) -> _Words:
    """First line of the class's docstring as its source has it, else the summary of its distribution."""
    import importlib.metadata

    from drivetrain.cli.source import first_line, requirements

    summary = importlib.metadata.metadata(entry.distribution).get_all("Summary") or ("",)
    required = requirements(entry.value)
    return _Words(first_line(entry.value) or summary[0], required or (), told=required is not None)


def _own_words(entry: Entry) -> _Words:
    """First line of the class's docstring, or why there is no class."""
    from drivetrain import registry
    from drivetrain.errors import EngineError, PluginError

    try:
        found = registry.load(entry)
    except EngineError:  # told beside its words
        found = registry.describe(entry)
    except PluginError as error:
        return _Words(f"BROKEN: {error}")
    return _Words((found.__doc__ or "").strip().partition("\n")[0].replace("``", ""), getattr(found, "requires", ()))
