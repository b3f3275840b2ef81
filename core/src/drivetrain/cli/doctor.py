"""``drivetrain doctor``: is what is installed fit to run?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import click

from drivetrain.cli.options import json_option, option

if TYPE_CHECKING:
    from drivetrain.doctor import Row

__all__ = ["doctor"]

_STATES = {True: ("ok", "green"), False: ("BAD", "red"), None: ("-", None)}


@click.command()
@json_option
@option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each plugin may take.",
)
def doctor(as_json: bool, timeout: float) -> None:
    """Load every installed plugin and run its checks, each in a process of its own.

    The exit code is 1 if anything is broken.
    """
    from drivetrain.doctor import examine_all

    rows = examine_all(timeout)
    if as_json:
        _print_json(rows)
    else:
        _print_findings(rows)
    if any(row.check.ok is False for row in rows):
        raise SystemExit(1)


def _print_json(rows: list[Row]) -> None:
    import json

    click.echo(json.dumps([row.as_dict() for row in rows], indent=2))


def _print_findings(rows: list[Row]) -> None:
    """A heading for each subject and a line for each check. No table: findings are long, and wanted whole."""
    width = max(len(row.check.name) for row in rows)
    for subject, group in itertools.groupby(rows, key=lambda row: row.subject):
        click.secho(subject, bold=True)
        for row in group:
            check = row.check
            state, color = _STATES[check.ok]
            found = check.detail + (f"\nto do: {check.fix}" if check.fix else "")
            first, *more = found.splitlines() or [""]
            click.echo(f"  {click.style(f'{state:<3}', fg=color)}  {check.name:<{width}}  {first}".rstrip())
            for line in more:
                click.echo(f"{'':{width + 9}}{line}")
