"""Sharded training beside the same written by hand: step time, and the memory that a rank holds.

python benchmarks/fsdp.py --ranks 2 --blocks 11
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from conductor import Turn, measure
from measuring import Summary, add_common_options, table, write_results
from torch import Tensor, nn
from training import Pass, Transformer

BACKENDS = ("ddp", "fsdp", "fsdp1")
_UNIT = nn.TransformerEncoderLayer


@attrs.frozen
class _Loop:
    """Something that trains, and what it holds in memory."""

    run: Pass
    model: nn.Module
    optimizer: torch.optim.Optimizer


def build(backend: str, options: Mapping[str, Any]) -> tuple[Pass, Pass]:
    """One pass of the hand-written loop and one of Drivetrain's, for the worker to time."""
    torch.set_num_threads(1)
    own = _drivetrain(backend, options)  # first: it brings up the process group that both use
    by_hand = _by_hand(backend, options)
    held = {}
    for name, loop in (("drivetrain", own), ("by hand", by_hand)):
        loop.run()
        held[name] = {kind: _bytes(tensors) for kind, tensors in _held(loop).items()}
    if os.environ["RANK"] == "0":
        Path(options["reports"], f"{backend}.json").write_text(json.dumps(held))
    return by_hand.run, own.run


def _model(options: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(width=options["width"], layers=options["layers"])


def _batches(options: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return [
        (torch.randint(0, 256, (8, 64), generator=generator), torch.randint(0, 10, (8,), generator=generator))
        for _ in range(options["steps"])
    ]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _drivetrain(backend: str, options: Mapping[str, Any]) -> _Loop:
    from drivetrain import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if backend != "ddp":
        version = 2 if backend == "fsdp" else 1
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, transformer_cls_names_to_wrap=[_UNIT])
    accelerator = Accelerator(cpu=True, backend=backend, fsdp_plugin=plugin)
    model = _model(options)
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    batches = _batches(options)

    def run() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return _Loop(run, model, optimizer.optimizer)


def _by_hand(backend: str, options: Mapping[str, Any]) -> _Loop:
    model, clip = _WRAPPERS[backend](_model(options))
    optimizer = _optimizer(model)
    batches = _batches(options)

    def run() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            clip(1.0)
            optimizer.step()

    return _Loop(run, model, optimizer)


_Wrapped = tuple[nn.Module, Callable[[float], Any]]


def _wrap_ddp(model: nn.Module) -> _Wrapped:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, functools.partial(nn.utils.clip_grad_norm_, list(wrapped.parameters()))


def _wrap_fsdp(model: nn.Module) -> _Wrapped:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for module in model.modules():
        if isinstance(module, _UNIT):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))


def _wrap_fsdp1(model: nn.Module) -> _Wrapped:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({_UNIT}), device_id=torch.device("cpu"), use_orig_params=True
    )
    return wrapped, wrapped.clip_grad_norm_


_WRAPPERS: Mapping[str, Callable[[nn.Module], _Wrapped]] = {
    "ddp": _wrap_ddp,
    "fsdp": _wrap_fsdp,
    "fsdp1": _wrap_fsdp1,
}


def _held(loop: _Loop) -> dict[str, list[Any]]:
    parameters = list(loop.model.parameters())
    return {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": [value for entries in loop.optimizer.state.values() for value in entries.values()],
    }


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the memory behind tensors, each counted once."""
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own if t.numel()}.values())


def _row(backend: str, turns: Sequence[Turn], steps: int, held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "backend": backend,
        "by_hand": attrs.asdict(Summary.of([turn.reference.wall / steps for turn in turns])),
        "drivetrain": attrs.asdict(Summary.of([turn.contender.wall / steps for turn in turns])),
        "relative": attrs.asdict(Summary.of([turn.relative("wall") for turn in turns])),
        "relative_cpu": attrs.asdict(Summary.of([turn.relative("cpu") for turn in turns])),
        "relative_by_block": [round(turn.relative("wall"), 4) for turn in turns],
        "held": held,
    }


def _print(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    headers = ["", "by hand, ms", "drivetrain, ms", "ratio, wall", "ratio, CPU", "held by hand, MB", "held, MB"]
    cells = [
        [
            row["backend"],
            Summary(**row["by_hand"]).text(1e3, 1),
            Summary(**row["drivetrain"]).text(1e3, 1),
            Summary(**row["relative"]).text(digits=2),
            Summary(**row["relative_cpu"]).text(digits=2),
            _megabytes(row["held"]["by hand"]),
            _megabytes(row["held"]["drivetrain"]),
        ]
        for row in rows
    ]
    print(f"\n{title}\n\n{table(headers, cells)}")


def _megabytes(held: Mapping[str, int]) -> str:
    return " + ".join(f"{held[kind] / 1e6:.2f}" for kind in ("parameters", "gradients", "optimizer"))


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, on the CPU")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--width", type=int, default=128, help="features of the transformer")
    parser.add_argument("--layers", type=int, default=4, help="layers of the transformer, each a unit")
    add_common_options(parser, blocks=11)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        options = {"steps": args.steps, "width": args.width, "layers": args.layers, "reports": folder}
        measured = measure("fsdp:build", BACKENDS, options, ranks=args.ranks, blocks=args.blocks)
        held = {backend: json.loads(Path(folder, f"{backend}.json").read_text()) for backend in BACKENDS}
    rows = [_row(backend, found.turns, args.steps, held[backend]) for backend, found in measured.items()]
    title = f"a step on {args.ranks} ranks; held by a rank: parameters + gradients + optimizer state"
    _print(title, rows)
    if not args.no_results:
        print(f"\n{write_results('fsdp', rows, load)}")


if __name__ == "__main__":
    main()
