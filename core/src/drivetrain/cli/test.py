"""``drivetrain test``: is the world that the settings describe really there, and does it train?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import command_line, config_file_option, option, set_option, setting_options

if TYPE_CHECKING:
    from drivetrain.launch.plan import LaunchPlan

__all__ = ["test"]

_Row = tuple[str, bool, str]
_SIGNALLED = 128
"""Exit codes above it tell the number of the signal that ended the launcher."""


@click.command()
@config_file_option
@setting_options("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
@setting_options("backend", "mixed_precision", "device")
@option("--cpu", is_flag=True, help="The same as --device cpu.")
@setting_options("gpu_ids", "collective_timeout")
@set_option
def test(config_file: str | None, cpu: bool, assignments: tuple[str, ...], **flags: Any) -> None:
    """Start the configured world, run collectives and a short training in it, and compare with one process.

    Ends with an exit code above 0 if the world is not what was asked for, or anything in it gives a wrong result.
    """
    from drivetrain.config import resolve
    from drivetrain.launch.elastic import run_folder
    from drivetrain.launch.prepare import launcher_environment
    from drivetrain.launch.script import ready, run

    if cpu and flags["device"] not in (None, "cpu"):
        raise click.UsageError(f"--cpu and --device ({flags['device']}) contradict each other")
    flags["device"] = "cpu" if cpu else flags["device"]
    resolved = resolve(config_file, command_line(flags, assignments), environment=launcher_environment())
    with run_folder() as folder:
        prepared = ready(resolved, "drivetrain.testing.smoke", [str(folder)], module=True)
        for note in prepared.notes:
            click.echo(f"drivetrain test: {note}", err=True)
        code, _ = run(prepared, resolved)
        lines = _lines(folder)
    if prepared.plan.machine_rank == 0:
        if code > _SIGNALLED:
            raise SystemExit(code)  # stopped from outside, which says nothing of the world
        code = _show(lines, prepared.plan, code)
    raise SystemExit(code)


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "report.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _show(lines: list[dict[str, Any]], plan: LaunchPlan, code: int) -> int:
    """Print what was found; returns the exit code."""
    from drivetrain.cli.output import print_table

    facts, checks = (lines[0], lines[1:]) if lines else ({}, [])
    rows = [*_world(facts, plan), *((line["check"], line["ok"], line["detail"]) for line in checks)]
    print_table(("check", "result", "found"), [(name, "ok" if ok else "BAD", found) for name, ok, found in rows])
    bad = [name for name, ok, _ in rows if not ok]
    if not bad and code == 0:
        click.echo(
            f"This world works: {plan.processes_total} process(es), backend {facts['backend']}, {facts['runs on']}, "
            f"mixed_precision {facts['precision']}."
        )
        return 0
    reason = f"wrong: {', '.join(bad)}" if bad else f"it ended with exit code {code} after {len(checks)} checks"
    click.echo(f"This world does not work; {reason}.", err=True)
    return code or 1


def _world(facts: dict[str, Any], plan: LaunchPlan) -> list[_Row]:
    """What was asked for, compared with what came up."""
    if not facts:
        return [("world", False, "it never came up; its first error is above")]
    asked = {"processes": plan.processes_total, "backend": plan.backend, "device": plan.device}
    rows = [_compare(name, wanted, facts[name]) for name, wanted in asked.items()]
    # A family of precisions is asked for by its own name, and a member comes up.
    family = plan.precision != facts["precision"] and plan.precision in _families()
    rows.append(_compare("precision", facts["precision"] if family else plan.precision, facts["precision"]))
    rows.append(_compare("ranks", list(range(plan.processes_total or 0)), facts["ranks"]))
    return rows


def _compare(name: str, wanted: Any, found: Any) -> _Row:
    return (name, True, str(found)) if wanted == found else (name, False, f"{found}, but {wanted} was asked for")


def _families() -> set[str]:
    from drivetrain import registry

    loaded, _ = registry.load_all("precision")
    return {found.family for found in loaded.values() if found.family is not None}
