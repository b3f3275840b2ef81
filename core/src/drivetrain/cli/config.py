"""``drivetrain config``: write a file of settings, check one, show what is in force and why."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import command_line, config_file_option, json_option, option, set_option, setting_options

if TYPE_CHECKING:
    from drivetrain.config import Resolved, Row

__all__ = ["config"]


@click.group(invoke_without_command=True)
@click.pass_context
def config(ctx: click.Context) -> None:
    """Write, check and show settings. Without a subcommand: write the default file, asking nothing."""
    if ctx.invoked_subcommand is None:
        with default.make_context("default", [], parent=ctx) as of_default:  # unlike ctx.invoke(), with callbacks
            default.invoke(of_default)


@config.command()
@config_file_option
@set_option
@json_option
def show(config_file: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show every setting, its value, and where it came from; also of the plugins that are chosen.

    Plugins that are not there, sections that they refuse and settings that exclude each other are reported below; the
    exit code is 2 then. So are engines that are missing here, as warnings.
    """
    from drivetrain.checking import contradictions, engines_missing, problems_of, sections_in_force
    from drivetrain.cli.output import stdout_kept_clean
    from drivetrain.config import resolve

    with stdout_kept_clean():
        resolved = resolve(config_file, command_line({}, assignments))
        problems, missing = [*problems_of(resolved), *contradictions(resolved)], engines_missing(resolved)
        rows = resolved.rows(sections_in_force(resolved))
    if as_json:
        _print_json(resolved, rows, problems, missing)
    else:
        _print_table(resolved, rows)
    _warn(missing)
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    if problems:
        raise SystemExit(2)


def _warn(missing: list[str]) -> None:
    """Tell of engines that are not here. No error: the settings may be for another machine."""
    for message in missing:
        click.echo(f"Warning: {message}", err=True)


def _print_json(resolved: Resolved, rows: list[Row], problems: list[str], missing: list[str]) -> None:
    import json

    from drivetrain.config.values import display

    shadowed: dict[str, list[dict[str, str]]] = {}
    for row in resolved.overridden():
        shadowed.setdefault(row.key, []).append({"value": row.shadowed, "origin": str(row.shadowed_origin)})
    settings = [
        {"key": row.key, "value": row.value, "origin": str(row.origin), "overridden": shadowed.get(row.key, [])}
        for row in rows
    ]
    shown = {
        "config_file": resolved.config_file,
        "settings": settings,
        "problems": problems,
        "engines_missing": missing,
    }
    click.echo(json.dumps(_strict(shown), indent=2, default=display))


def _strict(data: Any) -> Any:
    """The same without numbers that JSON doesn't have: not finite, they are the text that the file has for them."""
    from drivetrain.config.values import display

    if isinstance(data, dict):
        return {key: _strict(item) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(item) for item in data]
    return display(data) if isinstance(data, float) and not math.isfinite(data) else data


def _print_table(resolved: Resolved, rows: list[Row]) -> None:
    from drivetrain.cli.output import print_table
    from drivetrain.config import default_config_file

    said: dict[str, str] = {}
    for row in resolved.overridden():
        said[row.key] = said.get(row.key, "") + f"; {row.shadowed_origin} said {row.shadowed}"
    click.echo(f"config file: {resolved.config_file or f'none; the default would be {default_config_file()}'}")
    cells = [(row.key, row.text, f"{row.origin}{said.get(row.key, '')}") for row in rows]
    print_table(("key", "value", "origin"), cells, faint=lambda row: row[2] == "default")


@config.command()
@click.argument("file", required=False)
def check(file: str | None) -> None:
    """Check FILE, else the file that would be read, with the sections of all installed plugins.

    The exit code is 2 if anything in it is wrong. An engine that is not installed here, of a plugin that the file
    chooses, is a warning, and the exit code 0: the file may be for another machine.
    """
    from drivetrain.checking import contradictions, engines_missing, problems_of
    from drivetrain.config import resolve
    from drivetrain.config.problems import fail

    location = ("DRIVETRAIN_CONFIG", "DRIVETRAIN_HOME", "XDG_CONFIG_HOME")  # nothing else of this environment
    resolved = resolve(file, {}, environment={name: os.environ[name] for name in location if name in os.environ})
    if problems := [*problems_of(resolved), *contradictions(resolved)]:
        fail(problems)
    missing = engines_missing(resolved)
    _warn(missing)
    path, sections = resolved.config_file, resolved.sections()
    checked = f" (sections: {', '.join(sections)})" if sections else ""
    elsewhere = "; it can't run on this machine, where an engine is missing" if missing else ""
    click.echo(
        f"{path}: no problem found{checked}{elsewhere}"
        if path
        else "there is no config file; all settings are defaults"
    )


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


@config.command()
@click.argument("file")
@option("--output", metavar="FILE", help="Write the translation there instead of on the terminal.")
@option("--overwrite", is_flag=True, help="Replace that file if there is one.")
@option("--verbose", "-v", is_flag=True, help="Say of every key what has become of it.")
def migrate(file: str, output: str | None, overwrite: bool, verbose: bool) -> None:
    """Translate FILE, a configuration of Accelerate's, and say which of its keys have no counterpart here.

    Nothing is left out in silence: what could not be translated is listed, in the translation too. The exit code is 2
    if the translation is not valid as it stands.
    """
    from drivetrain.cli.migrating import problems_in, translated_text
    from drivetrain.config.files import expanded
    from drivetrain.config.migration import translate
    from drivetrain.config.reader import read_file
    from drivetrain.config.template import write_file

    translation = translate(read_file(file))
    text = translated_text(file, translation)
    if not verbose:
        click.echo(f"{file}: {translation.summary}; --verbose lists each", err=True)
    for line in translation.lines if verbose else translation.missing:
        click.echo(line, err=True)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(expanded(output), text, overwrite)
        missing = len(translation.missing)
        left = f"; {missing} key(s) could not be translated, see its end" if missing else ""
        click.echo(f"wrote {output}{left}", err=True)
    problems = problems_in(text, output or "the translation")
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    if problems:
        raise SystemExit(2)
