"""How long one waits for an import, and for the command line's help, each in a fresh process.

    python benchmarks/import_time.py

Every row is compared with another of the same block, as the table says.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence

import attrs
from measuring import Summary, Times, add_common_options, table, write_results

_PYTHON = (sys.executable, "-c")


@attrs.frozen
class Command:
    """What is started, and which other row its time is compared with."""

    arguments: Sequence[str]
    against: str
    needs: str = "drivetrain"
    """Module without which the row is left out."""


def commands() -> Mapping[str, Command]:
    """Rows of the table: those whose modules are installed."""
    script = shutil.which("drivetrain", path=sysconfig.get_path("scripts")) or "drivetrain"
    rows = {
        "python -c pass": Command([*_PYTHON, "pass"], "python -c pass"),
        "import drivetrain": Command([*_PYTHON, "import drivetrain"], "python -c pass"),
        "drivetrain --help": Command([script, "--help"], "python -c pass"),
        "drivetrain launch --help": Command([script, "launch", "--help"], "python -c pass"),
        "import torch": Command([*_PYTHON, "import torch"], "import torch", "torch"),
        "from drivetrain import Accelerator": Command(
            [*_PYTHON, "from drivetrain import Accelerator"], "import torch", "torch"
        ),
        "from accelerate import Accelerator": Command(
            [*_PYTHON, "from accelerate import Accelerator"], "import torch", "accelerate"
        ),
        "from lightning_fabric import Fabric": Command(
            [*_PYTHON, "from lightning_fabric import Fabric"], "import torch", "lightning_fabric"
        ),
        "accelerate --help": Command([*_PYTHON, _ACCELERATE_HELP], "python -c pass", "accelerate"),
    }
    return {name: command for name, command in rows.items() if importlib.util.find_spec(command.needs)}


_ACCELERATE_HELP = (
    "import sys; sys.argv = ['accelerate', '--help']; from accelerate.commands.accelerate_cli import main; main()"
)


def _run(command: Command) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Installed packages come with their bytecode; what is imported from a checkout may keep its own, too.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command.arguments, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _child_seconds(command: Command) -> dict[str, float]:
    """Wall and CPU time of a child process."""
    before = os.times()
    wall = Times.of(lambda: _run(command)).wall
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "cpu": cpu}


def main() -> None:
    """Start every command once a block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    args = parser.parse_args()

    load, started = os.getloadavg()[0], commands()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in started}
    for block in range(-1, args.blocks):
        for name, command in started.items():
            times = _child_seconds(command)
            if block >= 0:  # the first block fills the page cache and writes bytecode
                taken[name].append(times)

    rows = []
    for name, command in started.items():
        row = {"command": name, "against": command.against}
        for clock in ("cpu", "wall"):
            own, other = ([t[clock] for t in taken[which]] for which in (name, command.against))
            row[clock] = attrs.asdict(Summary.of(own))
            row[f"added_{clock}"] = attrs.asdict(Summary.of([a - b for a, b in zip(own, other, strict=True)]))
        rows.append(row)
    headers = ["s", "CPU", "wall", "compared with", "added, CPU", "added, wall"]
    cells = [
        [
            row["command"],
            *(f"{row[clock]['median']:.2f}" for clock in ("cpu", "wall")),
            row["against"],
            *(Summary(**row[f"added_{clock}"]).text(digits=3) for clock in ("cpu", "wall")),
        ]
        for row in rows
    ]
    print(table(headers, cells))
    if not args.no_results:
        print(f"\nwritten: {write_results('import_time', rows, load)}")


if __name__ == "__main__":
    main()
