"""``drivetrain launch``: run a script in one or many processes, on one or many machines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.options import (
    BothSpellings,
    command_line,
    config_file_option,
    option,
    set_option,
    setting_option,
    setting_options,
)

if TYPE_CHECKING:
    from drivetrain.config import Resolved
    from drivetrain.launch.prepare import Prepared

__all__ = ["launch"]

_USED = "drivetrain.used_backends"

_TEE_NUMBERS = {"0": "none", "1": "stdout", "2": "stderr", "3": "all"}
"""How torch's own launcher writes which streams to copy."""

_MOST_RANKS = 64
"""Whose environment a dry run shows."""

_SEVERAL_FLAGS = ("multi_gpu", "multi_cpu")
"""Flags of older launch commands, in scripts that people have."""


class _LaunchCommand(click.Command):
    """Adds a flag ``--use_NAME`` for every installed backend, and leaves everything after the script alone."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from drivetrain import registry

        return [*super().get_params(ctx), *(_use_flag(name) for name in sorted(registry.entries()["backend"]))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = error.option_name.replace("-", "_")
            if flag.startswith("__use_"):
                raise _unknown_backend(flag.removeprefix("__use_"), error.option_name, ctx) from None
            raise


def _use_flag(name: str) -> click.Option:
    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta.setdefault(_USED, []).append(name)

    return BothSpellings(
        [f"--use_{name}"], is_flag=True, expose_value=False, callback=remember, help=f"The same as --backend {name}."
    )


def _unknown_backend(name: str, flag: str, ctx: click.Context) -> click.UsageError:
    """What the registry says of a backend that isn't there: how to install it, or what was meant."""
    from drivetrain import registry
    from drivetrain.errors import PluginError

    try:
        registry.find("backend", name)
    except PluginError as error:
        return click.UsageError(f"{flag}: {error}", ctx)
    return click.UsageError(f"no such flag: {flag}; write --backend {name}", ctx)


@click.command(cls=_LaunchCommand, context_settings={"allow_interspersed_args": False})
@config_file_option
@setting_options("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
@setting_options("backend", "mixed_precision", "device")
@option("--cpu", is_flag=True, help="The same as --device cpu.")
@setting_options("gpu_ids", "gradient_accumulation_steps")
@set_option
@setting_options("max_restarts", "monitor_interval", "rdzv_backend", "rdzv_conf", "tee", "log_dir")
@option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@option("--no_python", is_flag=True, help="SCRIPT is a program that is run as it is.")
@option("--multi_gpu", is_flag=True, hidden=True)
@option("--multi_cpu", is_flag=True, hidden=True)
@option("--dry_run", is_flag=True, help="Show what would be started, with every setting and its origin, and stop.")
@option("--quiet", is_flag=True, help="Report nothing but errors.")
@setting_option("debug")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    script: str,
    script_args: tuple[str, ...],
    config_file: str | None,
    assignments: tuple[str, ...],
    module: bool,
    no_python: bool,
    dry_run: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Run SCRIPT in as many processes as the settings say. Everything after SCRIPT is handed to it untouched.

    Ends with exit code 0, or with that of the first process that failed.
    """
    from drivetrain.config import resolve
    from drivetrain.launch.prepare import launcher_environment
    from drivetrain.launch.script import ready, run

    notes = [_several_note(name) for name in _SEVERAL_FLAGS if flags.pop(name)]
    settings = command_line(_settings(ctx, flags), assignments)
    resolved = resolve(config_file, settings, environment=launcher_environment())
    prepared = ready(resolved, script, script_args, module=module, no_python=no_python, quiet=quiet)
    if not quiet:
        for note in [*notes, *prepared.notes]:
            click.echo(f"drivetrain launch: {note}", err=True)
    if dry_run:
        _show(resolved, prepared)
        return
    code, _ = run(prepared, resolved)
    sys.exit(code)


def _settings(ctx: click.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as settings, with the short forms spelt out."""
    used = [(f"--use_{name}", name) for name in ctx.meta.get(_USED, ())]
    settings = {
        **flags,
        "backend": _one([("--backend", flags["backend"]), *used]),
        "device": _one([("--device", flags["device"]), ("--cpu", "cpu" if flags["cpu"] else None)]),
        "tee": _TEE_NUMBERS.get(flags["tee"], flags["tee"]),
    }
    del settings["cpu"]
    return settings


def _one(given: list[tuple[str, str | None]]) -> str | None:
    """The one value of flags that mean the same setting."""
    said = [(flag, value) for flag, value in given if value is not None]
    if len({value for _, value in said}) > 1:
        raise click.UsageError(" and ".join(f"{flag} ({value})" for flag, value in said) + " contradict each other")
    return said[0][1] if said else None


def _several_note(name: str) -> str:
    return (
        f"--{name} is accepted and changes nothing: several processes (--num_processes) get the installed default "
        f"backend, another with --backend"
    )


# -------------------------------------------------------------------------------------------------------------- dry run


def _show(resolved: Resolved, prepared: Prepared) -> None:
    """Print the plan, the environment of its processes and every setting with its origin."""
    from drivetrain.checking import sections_in_force
    from drivetrain.cli.output import print_table

    rows = resolved.rows(sections_in_force(resolved))
    print_table(("plan", ""), _plan_rows(prepared))
    print_table(("variable", "value", "of"), _environment_rows(prepared))
    print_table(
        ("setting", "value", "origin"),
        [(row.key, row.text, str(row.origin)) for row in rows],
        faint=lambda row: row[2] == "default",
    )


def _plan_rows(prepared: Prepared) -> list[tuple[str, str]]:
    import shlex

    plan, hooks = prepared.plan, prepared.hooks
    count = plan.processes or 1
    ranks = f"rank {plan.first_rank}" if count == 1 else f"ranks {plan.first_rank} to {plan.first_rank + count - 1}"
    port = plan.main_process_port or "a free port"
    chosen = [(role, str(hooks.origin(role))) for role in ("backend", "device")]
    return [
        ("script", shlex.join([plan.script, *plan.script_args])),
        ("processes", f"{count} on this machine ({ranks}), {plan.processes_total} in total"),
        ("machine", f"{plan.machine_rank} of {plan.machines}"),
        ("meeting point", f"{plan.main_process_ip or '127.0.0.1'}, {port}"),
        *chosen,
        ("precision", str(plan.precision)),
        ("started by", str(hooks.owner("launch") or "core")),
        ("restarts", str(plan.max_restarts)),
    ]


def _environment_rows(prepared: Prepared) -> list[tuple[str, str, str]]:
    from drivetrain.launch.elastic import process_environment
    from drivetrain.launch.environment import rank_environment

    plan = prepared.plan
    count = plan.processes or 1
    shown = range(min(count, _MOST_RANKS))
    places = [rank_environment(local, count, plan.machine_rank, plan.machines) for local in shown]
    common = process_environment(plan, "the settings below, in a file of this run")
    common |= {name: value for name, value in places[0].items() if all(place[name] == value for place in places)}
    rows = [(name, value, "every process") for name, value in sorted(common.items())]
    for place in places:
        rows += [(name, value, f"rank {place['RANK']}") for name, value in place.items() if name not in common]
    if count > len(places):
        rows.append(("...", "", f"{count - len(places)} more ranks"))
    return rows
