"""``drivetrain new-plugin``: write a package that is a complete plugin, and keeps the contract as it is."""

from __future__ import annotations

import importlib.util
import json
import re
from datetime import date
from pathlib import Path

import click

from drivetrain import __version__
from drivetrain.cli.options import option
from drivetrain.config.files import expanded
from drivetrain.discovery import CORE, GROUPS, entries, extras
from drivetrain.errors import DrivetrainError

__all__ = ["new_plugin"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_WORDS_OF_SETTINGS = frozenset({"auto", "all", "none"})
"""Values of core's settings that stand where a plugin's name may."""


@click.command("new-plugin")
@click.argument("name")
@option("--role", type=click.Choice(sorted(GROUPS)), required=True, help="What the plugin is to be.")
@option("--directory", metavar="FOLDER", help=f"Where to write it; else {CORE}-NAME in the current one.")
@option("--author", metavar="TEXT", help="Who wrote it, for its metadata and its license.")
def new_plugin(name: str, role: str, directory: str | None, author: str | None) -> None:
    """Write a package that is a plugin called NAME: the name in the YAML, and of its section there.

    As it is written it trains, and passes the conformance kit on a CPU machine. What is to be filled in is said in it.
    """
    _check_name(name)
    folder = expanded(directory or f"{CORE}-{name}")
    _check_folder(folder)
    files = _files(name, role, author or f"The authors of {CORE}-{name}")
    for path, text in files.items():
        _write(folder / path, text)
    click.echo(f"wrote {len(files)} files into {folder}. Next:\n")
    click.echo(f"  cd {folder}\n  pip install -e '.[test]'\n  drivetrain plugins\n{_conform(name, role)}\n")
    click.echo("README.md says what to fill in, and docs/plugins.md of Drivetrain the whole way to a release.")


def _check_name(name: str) -> None:
    """Refuse a name that could not be installed, or would be taken for something else."""
    reason = _malformed(name) or _taken(name)
    if reason:
        raise click.BadParameter(reason, param_hint="NAME")


def _malformed(name: str) -> str | None:
    if name.startswith(f"{CORE}-"):
        return f"leave {CORE}- out, the package gets it by itself: {name.removeprefix(f'{CORE}-')}"
    if not _NAME.fullmatch(name):
        proposal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").lstrip("-0123456789")
        hint = f"; what about {proposal!r}?" if proposal else ""
        return f"{name!r} is not made of lower-case letters, digits and single dashes, beginning with a letter{hint}"
    return None


def _taken(name: str) -> str | None:
    """Who has the name already."""
    import yaml

    from drivetrain.config.schema import field_names

    if name in field_names() or name in _WORDS_OF_SETTINGS or yaml.safe_load(name) != name:
        return f"{name!r} is a word of the YAML itself, which could not be told from the plugin's name or its section"
    installed = [entry for names in entries().values() for entry in names.get(name, ())]
    if installed:
        return f"{installed[0]} is installed; two plugins of one name can't be told apart"
    if name in extras():
        return f'{name!r} is what pip install "{CORE}[{name}]" brings'
    if importlib.util.find_spec(_package(name)) is not None:
        return f"there is a package called {_package(name)} in this environment already"
    return None


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise click.BadParameter(
            f"{folder} exists and is not an empty folder; nothing was written", param_hint="--directory"
        )


def _write(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    except OSError as error:
        raise DrivetrainError(f"{target} can't be written: {error.strerror}") from error


def _package(name: str) -> str:
    """Name of the import package."""
    return f"{CORE}_{name.replace('-', '_')}"


def _files(name: str, role: str, author: str) -> dict[str, str]:
    from drivetrain.templates import render

    word = name.replace("-", "_")
    camel = "".join(part.capitalize() for part in name.split("-"))
    kind = role.capitalize()
    least = ".".join(__version__.split(".")[:2])
    members = [CORE, f"{CORE}-backends"] if role == "backend" else [CORE]
    dependencies = ["attrs>=23.2", *(f"{member}>={least}" for member in members), "torch>=2.9"]
    suite = f'{role}="{name}"' + ("" if role == "device" else ', device="cpu"')
    return render(
        role,
        {
            "name": name,
            "word": word,
            "capitals": word.upper(),
            "role": role,
            "group": GROUPS[role],
            "distribution": f"{CORE}-{name}",
            "package": _package(name),
            "cls": camel.removesuffix(kind) + kind,
            "config": f"{camel}Config",
            "dependencies": ", ".join(json.dumps(text) for text in dependencies),
            "author": author,
            "quoted_author": json.dumps(author, ensure_ascii=False),  # which TOML reads as it is
            "year": str(date.today().year),
            "suite": suite,
        },
    )


def _conform(name: str, role: str) -> str:
    on_cpu = "" if role == "device" else " --device cpu"
    return f"  drivetrain conform --{role} {name}{on_cpu}"
