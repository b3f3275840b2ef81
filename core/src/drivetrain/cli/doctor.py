"""``drivetrain doctor``: is what is installed fit to run?"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from drivetrain.cli.options import json_option, option

if TYPE_CHECKING:
    from drivetrain.doctor import Row

__all__ = ["doctor"]

_STATES = {True: ("ok", "green"), False: ("BAD", "red"), None: ("-", None)}


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds that can be waited", ctx, param)
    return value


@click.command()
@json_option
@option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
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

    with contextlib.closing(examine_all(timeout)) as examined:
        if as_json:
            rows = list(examined)
            _print_json(rows)
        else:
            click.echo("looking at everything that is installed, each plugin in a process of its own", err=True)
            rows = list(_printed(examined))
    if any(row.check.ok is False for row in rows):
        raise SystemExit(1)


def _print_json(rows: list[Row]) -> None:
    import json

    click.echo(json.dumps([row.as_dict() for row in rows], indent=2))


_WIDTH = 24
"""Of the column of checks' names; rows are printed as they come, before the longest is known."""


def _printed(rows: Iterable[Row]) -> Iterator[Row]:
    """Pass rows on, printed: a heading for each subject and a line for each check.

    No table: findings are long, and wanted whole.
    """
    for subject, group in itertools.groupby(rows, key=lambda row: row.subject):
        click.secho(subject, bold=True)
        for row in group:
            check = row.check
            state, color = _STATES[check.ok]
            found = check.detail + (f"\nto do: {check.fix}" if check.fix else "")
            first, *more = found.splitlines() or [""]
            click.echo(f"  {click.style(f'{state:<3}', fg=color)}  {check.name:<{_WIDTH}}  {first}".rstrip())
            for line in more:
                click.echo(f"{'':{_WIDTH + 9}}{line}")
            yield row
