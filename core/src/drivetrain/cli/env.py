"""``drivetrain env``: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import click

from drivetrain.cli.options import config_file_option, json_option, set_option

__all__ = ["env"]


@click.command()
@config_file_option
@set_option
@json_option
def env(config_file: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show versions, devices and the settings in force."""
    facts = {**_versions(), **_machine(), **_devices(), **_variables(), **_settings(config_file, assignments)}
    if as_json:
        import json

        click.echo(json.dumps(facts, indent=2))
    else:
        from drivetrain.cli.output import print_table

        print_table(("what", "found"), list(facts.items()))


def _versions() -> dict[str, str]:
    """This library, its members, and the distributions of all plugins."""
    from drivetrain import __version__, discovery

    members = {
        entry.distribution: entry.version
        for names in discovery.entries().values()
        for providers in names.values()
        for entry in providers
        if entry.distribution != discovery.CORE
    }
    return {"drivetrain": __version__, **dict(sorted(members.items())), "torch": _version("torch")}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, str]:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
    }


def _devices() -> dict[str, str]:
    """What torch can use. Broken installations are what this command is asked about: the error is the answer."""
    try:
        import torch

        if not torch.accelerator.is_available():
            return {"accelerator": "none; runs on the CPU"}
        kind = torch.accelerator.current_accelerator()
        return {"accelerator": f"{torch.accelerator.device_count()} x {kind.type if kind else 'unknown'}"}
    except Exception as error:  # an import runs arbitrary code of torch and of its extensions
        return {"accelerator": f"unknown: torch fails with {type(error).__name__}: {error}"}


def _variables() -> dict[str, str]:
    """Variables that change what a run does. Values of sections are left out: they may be keys of a service."""
    from drivetrain.config.schema import field_names

    ours = [name for name in sorted(os.environ) if name.startswith("DRIVETRAIN_")]
    plain = {f"DRIVETRAIN_{key}" for key in ("CONFIG", "HOME", "RESOLVED", *map(str.upper, field_names()))}
    foreign = [name for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ]
    return {name: os.environ[name] if name in plain or name in foreign else "(set)" for name in (*ours, *foreign)}


def _settings(config_file: str | None, assignments: tuple[str, ...]) -> dict[str, str]:
    from drivetrain.cli.options import command_line
    from drivetrain.config import resolve
    from drivetrain.errors import ConfigError

    try:
        resolved = resolve(config_file, command_line({}, assignments))
    except ConfigError as error:
        return {"settings": f"wrong: {error}"}
    found = {"config file": resolved.config_file or "none"}
    for row in resolved.rows():
        if "." not in row.key:
            found[row.key] = f"{row.text} ({row.origin})"
    return found
