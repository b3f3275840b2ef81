"""Batches a second that a prepared loader gives, beside a plain ``DataLoader``, with no training in between.

    python benchmarks/loader_rate.py
    python benchmarks/loader_rate.py --ranks 2 --kind dispatch

``map``: every rank loads its own samples. ``dispatch``: rank 0 loads for all and sends. The plain loader of several
ranks has torch's ``DistributedSampler``; torch has nothing to dispatch with, so the same loader stands beside that.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from conductor import DISTRIBUTIONS, Turn, installed, measure
from measuring import Summary, add_common_options, table, write_results
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Pass = Callable[[], None]


def build(contender: str, options: Mapping[str, Any]) -> tuple[Pass, Pass]:
    """One pass over the plain loader and one over the contender's, for the worker to time."""
    torch.set_num_threads(1)
    subject = _PREPARED[contender](options)
    return _pass(_plain(options)), _pass(subject)


def _pass(loader: Any) -> Pass:
    def run() -> None:
        for _ in loader:
            pass

    return run


def _data(options: Mapping[str, Any]) -> TensorDataset:
    rows = options["batches"] * options["batch_size"] * options["ranks"]
    return TensorDataset(torch.zeros(rows, 16), torch.zeros(rows, dtype=torch.int64))


def _unprepared(options: Mapping[str, Any]) -> DataLoader:
    return DataLoader(_data(options), options["batch_size"], shuffle=True)


def _plain(options: Mapping[str, Any]) -> Any:
    if options["ranks"] == 1:
        return _unprepared(options)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    data = _data(options)
    return DataLoader(data, options["batch_size"], sampler=DistributedSampler(data))


def _drivetrain(options: Mapping[str, Any]) -> Any:
    from drivetrain import Accelerator, DataLoaderConfiguration

    configuration = DataLoaderConfiguration(dispatch_batches=options["kind"] == "dispatch")
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(_unprepared(options))


def _accelerate(options: Mapping[str, Any]) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    configuration = DataLoaderConfiguration(dispatch_batches=options["kind"] == "dispatch")
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(_unprepared(options))


def _fabric(options: Mapping[str, Any]) -> Any:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=options["ranks"], strategy="ddp" if options["ranks"] > 1 else "auto")
    fabric.launch()
    return fabric.setup_dataloaders(_unprepared(options))


_PREPARED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "torch": _plain,
    "drivetrain": _drivetrain,
    "accelerate": _accelerate,
    "fabric": _fabric,
}


def _row(turns: Sequence[Turn], batches: int) -> dict[str, Any]:
    return {
        "batches_a_second": attrs.asdict(Summary.of([batches / turn.contender.wall for turn in turns])),
        "relative_rate": attrs.asdict(Summary.of([1 / turn.relative("wall") for turn in turns])),
        "relative_rate_cpu": attrs.asdict(Summary.of([1 / turn.relative("cpu") for turn in turns])),
    }


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--kind", nargs="+", default=["map", "dispatch"], choices=["map", "dispatch"])
    parser.add_argument("--contenders", nargs="+", default=list(DISTRIBUTIONS), choices=list(DISTRIBUTIONS))
    parser.add_argument("--batches", type=int, default=200, help="batches of one rank in a turn")
    parser.add_argument("--batch_size", type=int, default=32)
    add_common_options(parser, blocks=21)
    args = parser.parse_args()

    load, contenders, rows = os.getloadavg()[0], installed(args.contenders), []
    for ranks, kind in itertools.product(args.ranks, args.kind):
        if kind == "dispatch" and ranks == 1:
            continue  # there is nobody to send to
        case = {"ranks": ranks, "kind": kind, "batch_size": args.batch_size}
        able = [name for name in contenders if kind == "map" or name != "fabric"]  # Fabric does not dispatch
        measured = measure(
            "loader_rate:build", able, {**case, "batches": args.batches}, ranks=ranks, blocks=args.blocks
        )
        made = [{**case, "contender": name, **_row(found.turns, args.batches)} for name, found in measured.items()]
        cells = [
            [
                row["contender"],
                Summary(**row["batches_a_second"]).text(),
                Summary(**row["relative_rate"]).text(digits=2),
                Summary(**row["relative_rate_cpu"]).text(digits=2),
            ]
            for row in made
        ]
        headers = [f"{kind}, ranks {ranks}", "batches/s of a rank", "/ plain loader, wall", "/ plain loader, CPU"]
        print(f"\n{table(headers, cells)}", flush=True)
        rows += made
    if not args.no_results:
        print(f"\nwritten: {write_results('loader_rate', rows, load)}")


if __name__ == "__main__":
    main()
