"""Saving and loading a model of 100 M parameters with its optimizer's state, on a real disk.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --parameters 10 --blocks 11

``torch`` is a bare ``torch.save`` and ``torch.load`` of the two state dicts, forced to the disk as the others' are not
unless they do it themselves: a lower bound for a save that survives a power cut.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from conductor import DISTRIBUTIONS, installed, measure
from measuring import Summary, add_common_options, table, write_results
from torch import nn

Pass = Callable[[], None]
_CONTENDERS = [name for name in DISTRIBUTIONS if name != "torch"]


def build(contender: str, options: Mapping[str, Any]) -> tuple[Pass, Pass]:
    """Save, or load what was saved: bare torch, and the contender. For the worker to time."""
    save, load = _BUILDERS[contender](Path(options["directory"]) / contender, *_trained(options["parameters"]))
    base_save, base_load = _torch(Path(options["directory"]) / f"torch_{contender}", *_trained(options["parameters"]))
    if options["action"] == "save":
        return base_save, save
    base_save(), save()
    return base_load, load


def _trained(millions: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of square layers, and its optimizer after one step: three numbers a parameter in all."""
    layers, width = 8, int((millions * 1e6 / 8) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _torch(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Pass, Pass]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "state.pt"

    def save() -> None:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _prepared(accelerator: Any, directory: Path, model: nn.Module, optimizer: Any) -> tuple[Pass, Pass]:
    accelerator.prepare(model, optimizer)
    target = str(directory)
    return (lambda: accelerator.save_state(target)), (lambda: accelerator.load_state(target))


def _drivetrain(directory: Path, model: nn.Module, optimizer: Any) -> tuple[Pass, Pass]:
    from drivetrain import Accelerator

    return _prepared(Accelerator(cpu=True), directory, model, optimizer)


def _accelerate(directory: Path, model: nn.Module, optimizer: Any) -> tuple[Pass, Pass]:
    from accelerate import Accelerator

    return _prepared(Accelerator(cpu=True), directory, model, optimizer)


def _fabric(directory: Path, model: nn.Module, optimizer: Any) -> tuple[Pass, Pass]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    state, path = {"model": model, "optimizer": optimizer}, directory / "state.ckpt"
    return (lambda: fabric.save(path, state)), (lambda: fabric.load(path, state) and None)


_BUILDERS: Mapping[str, Callable[..., tuple[Pass, Pass]]] = {
    "drivetrain": _drivetrain,
    "accelerate": _accelerate,
    "fabric": _fabric,
}


def main() -> None:
    """Measure saving, then loading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100, help="parameters of the model, in millions")
    parser.add_argument("--contenders", nargs="+", default=_CONTENDERS, choices=_CONTENDERS)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; a temporary directory if absent")
    add_common_options(parser, blocks=11)
    args = parser.parse_args()

    load, contenders, rows = os.getloadavg()[0], installed(args.contenders), []
    for action in ("save", "load"):
        directory = Path(tempfile.mkdtemp(dir=args.directory))
        try:
            options = {"parameters": args.parameters, "directory": str(directory), "action": action}
            measured = measure("checkpoint:build", contenders, options, ranks=1, blocks=args.blocks, warm_up=1)
        finally:
            shutil.rmtree(directory)
        for name, found in measured.items():
            seconds = Summary.of([turn.contender.wall for turn in found.turns])
            relative = Summary.of([turn.relative("wall") for turn in found.turns])
            case = {"action": action, "parameters": args.parameters * 1e6, "contender": name}
            rows.append({**case, "seconds": attrs.asdict(seconds), "relative": attrs.asdict(relative)})
    headers = [f"{args.parameters:g} M parameters, AdamW", "seconds", "/ torch.save and torch.load"]
    cells = [
        [
            f"{row['action']}, {row['contender']}",
            Summary(**row["seconds"]).text(digits=2),
            Summary(**row["relative"]).text(digits=2),
        ]
        for row in rows
    ]
    print(table(headers, cells))
    if not args.no_results:
        print(f"\nwritten: {write_results('checkpoint', rows, load)}")


if __name__ == "__main__":
    main()
