"""The ``drivetrain`` command. Subcommands live in a file each, and are imported when they are used.

``drivetrain --help`` must be quick: nothing here, or at the top of a command's file, imports torch, rich or yaml.
"""

from __future__ import annotations

import errno
import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any, TextIO

import attrs
import click

from drivetrain import __version__
from drivetrain.errors import ConfigError, DrivetrainError, PluginNotFoundError

__all__ = ["main"]


@attrs.frozen
class _Entry:
    """A command that is not imported yet."""

    at: str
    """``module:attribute``."""
    help: str
    """One line for the list of commands, so that listing them imports none."""


_COMMANDS: Mapping[str, _Entry] = {
    "launch": _Entry("drivetrain.cli.launch:launch", "Run a script in one or many processes."),
    "config": _Entry("drivetrain.cli.config:config", "Write, check and show settings."),
    "plugins": _Entry("drivetrain.cli.plugins:plugins", "List installed backends, devices, precisions and trackers."),
    "test": _Entry("drivetrain.cli.test:test", "Start the configured world and check what it computes."),
    "doctor": _Entry("drivetrain.cli.doctor:doctor", "Check every installed plugin, each in a process of its own."),
    "conform": _Entry("drivetrain.cli.conform:conform", "Prove that an installed plugin keeps the contract."),
    "merge-weights": _Entry(
        "drivetrain.cli.merge_weights:merge_weights", "Make model files of a checkpoint's weights."
    ),
    "new-plugin": _Entry("drivetrain.cli.new_plugin:new_plugin", "Write a package that is a complete plugin."),
    "env": _Entry("drivetrain.cli.env:env", "Show versions, devices and settings, as for a bug report."),
}


class _Commands(click.Group):
    """Imports a command when it is called, and turns the library's errors into one message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].at.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            from drivetrain.config.problems import did_you_mean

            hint = did_you_mean(name, _COMMANDS) or f"; there are: {', '.join(_COMMANDS)}"
            raise click.UsageError(f"no such command: {name}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DrivetrainError as error:
            if _debug():
                raise
            notes = getattr(error, "__notes__", ())
            click.echo("\n".join([f"Error: {error}", *notes]), err=True)
            ctx.exit(2 if isinstance(error, (ConfigError, PluginNotFoundError)) else 1)
        except OSError as error:
            if _debug() or error.errno == errno.EPIPE:  # which click answers
                raise
            click.echo(f"Error: {error}", err=True)
            ctx.exit(1)


def _debug() -> bool:
    return os.environ.get("DRIVETRAIN_DEBUG", "").lower() in ("1", "true", "yes", "on")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="%(prog)s %(version)s", prog_name="drivetrain")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run one training loop on any number of devices, under any installed backend.

    Settings come from a YAML file, DRIVETRAIN_* variables and flags, in ascending order of precedence. Errors are shown
    with their traceback if DRIVETRAIN_DEBUG=1.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    ctx.with_resource(warnings.catch_warnings())
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as a command's own words, without the line of the library that it comes from."""
    click.echo(f"Warning: {message}", err=True)
