"""``drivetrain conform``: does an installed plugin keep the contract?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import json_option, option, set_option

if TYPE_CHECKING:
    from drivetrain.testing.conformance.report import Report

__all__ = ["conform"]


@click.command()
@option("--backend", metavar="NAME", help="An installed backend.")
@option("--device", metavar="NAME", help="An installed device; else auto.")
@option("--precision", "--mixed_precision", "precision", metavar="NAME", help="An installed precision; else full.")
@option(
    "--size",
    "sizes",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="NUMBER",
    help="Processes to run with; may be repeated. Else two, or one where the backend works with one only.",
)
@option("-k", "pattern", metavar="TEXT", help="Only checks whose group or name contains this text.")
@set_option
@json_option
@option("--markdown", is_flag=True, help="Print the table as Markdown.")
@option("--durations", type=click.IntRange(min=1), metavar="NUMBER", help="Also print so many of the slowest checks.")
@option("--list", "only_list", is_flag=True, help="List the checks, and run none.")
def conform(
    pattern: str | None,
    sizes: tuple[int, ...],
    assignments: tuple[str, ...],
    as_json: bool,
    markdown: bool,
    durations: int | None,
    only_list: bool,
    **plugins: Any,
) -> None:
    """Prove on real processes that plugins keep the contract.

    Results are compared with plain torch in one process. What a plugin claims to be able to do decides which checks it
    must pass. The exit code is 1 if one fails that is not declared as known.
    """
    from drivetrain.testing.conformance.checks import matching
    from drivetrain.testing.conformance.session import conform as examine
    from drivetrain.testing.conformance.subject import Suite

    checks = matching(pattern)
    if not checks:
        raise click.BadParameter(f"no check has {pattern!r} in its name; --list shows all", param_hint="'-k'")
    if only_list:
        click.echo("\n".join(str(check) for check in checks))
        return
    if not any(plugins.values()):
        raise click.UsageError("name what to examine: --backend, --device or --precision")
    suite = Suite(**plugins, sizes=sizes or None, settings=_settings(assignments))
    with _Progress(len(checks)) as progress:
        report = examine(suite, checks, progress.advance)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report, markdown, durations)
    if report.failed:
        raise SystemExit(1)


def _settings(assignments: tuple[str, ...]) -> dict[str, Any]:
    """``section.key=value`` as nested settings, the values read as everywhere on the command line."""
    from drivetrain.cli.options import command_line
    from drivetrain.config.layers import from_arguments
    from drivetrain.config.values import Origin, plain

    settings: dict[str, Any] = plain(from_arguments(command_line({}, assignments), Origin("command line")))
    return settings


class _Progress:
    """On a terminal, a bar and the check that was finished last; elsewhere, a line for each check."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=total)

    def advance(self, check: Any, outcomes: list[Any]) -> None:
        """A check is done."""
        if self._bar.disable:
            statuses = ", ".join(dict.fromkeys(outcome.status for outcome in outcomes))
            click.echo(f"{statuses:<8} {check}", err=True)
        self._bar.update(self._task, advance=1, description=str(check).replace("[", "("))

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def _show(report: Report, markdown: bool, durations: int | None) -> None:
    from drivetrain.testing.conformance.report import STATUSES

    if details := report.details():
        click.echo(details)
        click.echo()
    if markdown:
        click.echo(report.markdown())
    else:
        from drivetrain.cli.output import print_table

        print_table(("group", *STATUSES), report.rows())
    if durations:
        click.echo(report.durations(durations))
    click.echo(report.summary())
