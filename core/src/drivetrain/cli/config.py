"""``drivetrain config``: write a file of settings, check one, show what is in force and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import command_line, config_file_option, json_option, option, set_option, setting_options

if TYPE_CHECKING:
    from drivetrain.config import Resolved

__all__ = ["config"]


@click.group(invoke_without_command=True)
@click.pass_context
def config(ctx: click.Context) -> None:
    """Write, check and show settings. Without a subcommand: write the default file, asking nothing."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(default)


@config.command()
@config_file_option
@set_option
@json_option
def show(config_file: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show every setting, its value, and where it came from."""
    from drivetrain.config import resolve

    resolved = resolve(config_file, command_line({}, assignments))
    if as_json:
        _print_json(resolved)
    else:
        _print_table(resolved)


def _print_json(resolved: Resolved) -> None:
    import json

    shadowed: dict[str, list[dict[str, str]]] = {}
    for row in resolved.overridden():
        shadowed.setdefault(row.key, []).append({"value": row.shadowed, "origin": str(row.shadowed_origin)})
    settings = [
        {"key": row.key, "value": row.value, "origin": str(row.origin), "overridden": shadowed.get(row.key, [])}
        for row in resolved.rows()
    ]
    click.echo(json.dumps({"config_file": resolved.config_file, "settings": settings}, indent=2))


def _print_table(resolved: Resolved) -> None:
    from drivetrain.cli.output import print_table

    said: dict[str, str] = {}
    for row in resolved.overridden():
        said[row.key] = said.get(row.key, "") + f"; {row.shadowed_origin} said {row.shadowed}"
    click.echo(f"config file: {resolved.config_file or 'none'}")
    rows = [(row.key, row.text, f"{row.origin}{said.get(row.key, '')}") for row in resolved.rows()]
    print_table(("key", "value", "origin"), rows)


@config.command()
@click.argument("file", required=False)
def check(file: str | None) -> None:
    """Check FILE, else the file that would be read, with the sections of all installed plugins."""
    from drivetrain.cli.checking import check_config_file

    path, sections = check_config_file(file)
    checked = f" (sections: {', '.join(sections)})" if sections else ""
    click.echo(f"{path}: no problem found{checked}" if path else "there is no config file; all settings are defaults")


@config.command()
@config_file_option
@setting_options()
@set_option
@option("--overwrite", is_flag=True, help="Replace the file if there is one.")
def default(config_file: str | None, assignments: tuple[str, ...], overwrite: bool, **flags: Any) -> None:
    """Write a file with the settings given here, and all others as comments."""
    from drivetrain.config.template import write_config_file

    path, replaced = write_config_file(config_file, command_line(flags, assignments), os.environ, overwrite)
    click.echo(f"{'replaced' if replaced else 'wrote'} {path}")
