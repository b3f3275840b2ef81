"""What ``drivetrain test`` runs in the configured world: ``python -m drivetrain.testing.smoke FOLDER``.

Rank 0 writes one line of JSON for each check into ``FOLDER/report.jsonl`` as soon as it is done, so that a world that
breaks in the middle has told how far it came.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.collectives import broadcast, broadcast_object_list, gather_object

__all__ = ["REPORT", "main"]

REPORT = "report.jsonl"

_WIDTH = 16  # divisible by what low-precision matrix products want
_ROWS = 4
_STEPS = 2
_UPDATES = 4
_EXACT, _ROUGH = 1e-4, 0.1
"""Largest relative deviation of what training changed, from one process in full and in low precision."""


class WrongResultError(Exception):
    """A check found something else than it should."""


@attrs.define
class _Trained:
    """A short training, and what a single process makes of the same data."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    start: dict[str, Tensor]
    reference: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """The full weights; complete on rank 0."""
        run = self.accelerator.run
        found = run.hooks.model_state(run=run, model=self.model)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def main(folder: Path) -> None:
    """Run all checks; exits with 1 if any rank finds something wrong."""
    accelerator = Accelerator(gradient_accumulation_steps=_STEPS)
    report = _Report(accelerator, folder / REPORT)
    report.facts()
    report.check("gather", _gather)
    report.check("reduce", _reduce)
    report.check("broadcast", _broadcast)
    report.check("objects", _objects)
    report.check("data", _data)
    trained = _train(accelerator)
    report.check("training, against one process", lambda _: _against_one_process(trained))
    report.check("weights on all ranks", lambda _: _equal_weights(trained))
    if accelerator.run.config.num_machines == 1:  # the folder is this machine's
        report.check("save and load", lambda _: _save_and_load(trained, folder / "state"))
    failed = report.failed
    accelerator.end_training()
    if failed:
        sys.exit(1)


class _Report:
    """Collects what all ranks found; rank 0 writes it down."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator = accelerator
        self.path = path
        self.failed = False

    def facts(self) -> None:
        """Write what the world is, for whoever asked for it to compare."""
        run = self.accelerator.run
        ranks = gather_object(run, [run.world.rank])
        self._write({"processes": run.world.size, "ranks": ranks, **run.names, "runs on": str(run.world.device)})

    def check(self, name: str, function: Callable[[Accelerator], str]) -> None:
        """Run a check on every rank. It returns what it saw, or raises ``WrongResultError``."""
        try:
            ok, detail = True, function(self.accelerator)
        except WrongResultError as wrong:
            ok, detail = False, f"rank {self.accelerator.process_index}: {wrong}"
        everyone = gather_object(self.accelerator.run, [(ok, detail)])
        wrongs = [text for fine, text in everyone if not fine]
        self.failed = self.failed or bool(wrongs)
        self._write({"check": name, "ok": not wrongs, "detail": "; ".join(wrongs) or everyone[0][1]})

    def _write(self, line: dict[str, Any]) -> None:
        if self.accelerator.process_index == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise WrongResultError(f"{what} gave {found}, not {expected}")


def _mine(accelerator: Accelerator, *values: float) -> Tensor:
    return torch.tensor(values, device=accelerator.device)


def _gather(accelerator: Accelerator) -> str:
    rank, size = accelerator.process_index, accelerator.num_processes
    gathered = accelerator.gather(_mine(accelerator, rank, rank + 0.5))
    _expect(gathered.tolist(), [value for r in range(size) for value in (r, r + 0.5)], "gather")
    return f"joined {size} in rank order"


def _reduce(accelerator: Accelerator) -> str:
    rank, size = accelerator.process_index, accelerator.num_processes
    total = size * (size - 1) / 2
    _expect(accelerator.reduce(_mine(accelerator, rank)).item(), total, "reduce(sum)")
    _expect(accelerator.reduce(_mine(accelerator, rank), "mean").item(), total / size, "reduce(mean)")
    _expect(accelerator.reduce(_mine(accelerator, rank), "max").item(), size - 1, "reduce(max)")
    return "sum, mean and max"


def _broadcast(accelerator: Accelerator) -> str:
    last = accelerator.num_processes - 1
    for source in {0, last}:
        sent = broadcast(accelerator.run, _mine(accelerator, accelerator.process_index), source)
        _expect(sent.item(), source, f"broadcast from {source}")
    return f"from the first and the last of {last + 1}"


def _objects(accelerator: Accelerator) -> str:
    rank, size = accelerator.process_index, accelerator.num_processes
    _expect(gather_object(accelerator.run, [{"rank": rank}]), [{"rank": r} for r in range(size)], "gather_object")
    _expect(broadcast_object_list(accelerator.run, [f"from {rank}"]), ["from 0"], "broadcast_object_list")
    accelerator.wait_for_everyone()
    return "gathered and broadcast"


def _data(accelerator: Accelerator) -> str:
    """A length that no number of ranks above one divides well: each sample must come exactly once."""
    shards = accelerator.run.world.data_size
    length = 2 * shards * 3 + 1
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=3, shuffle=True))
    seen = [int(index) for batch in loader for index in accelerator.gather_for_metrics(batch)]
    _expect(sorted(seen), list(range(length)), "gather_for_metrics over an epoch")
    return f"{length} samples over {shards} shard(s), each once"


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))


def _train(accelerator: Accelerator) -> _Trained:
    """Train on the run's shards, and by hand in this process on all of them."""
    shards = accelerator.run.world.data_size
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_UPDATES * _STEPS * _ROWS * shards, _WIDTH, generator=generator)
    targets = inputs.flip(1).sin()
    model = _build()
    reference = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(inputs, targets), batch_size=_ROWS)
    )
    applied = []
    for x, y in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(F.mse_loss(prepared(x), y))
            optimizer.step()
            if accelerator.sync_gradients:
                applied.append(not optimizer.step_was_skipped)
            optimizer.zero_grad()
    groups = zip(inputs.chunk(_UPDATES), targets.chunk(_UPDATES), applied, strict=True)
    _train_by_hand(reference, [(x, y) for x, y, stepped in groups if stepped])
    return _Trained(accelerator, prepared, optimizer, start, reference.state_dict())


def _train_by_hand(model: nn.Module, groups: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in groups:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _against_one_process(trained: _Trained) -> str:
    found = trained.weights()  # on every rank: each may hold a part
    if trained.accelerator.process_index != 0:
        return ""
    _expect(sorted(found), sorted(trained.reference), "the names of the weights")
    change = _distance(trained.reference, trained.start)
    deviation = _distance(found, trained.reference) / max(change, 1e-12)
    allowed = _EXACT if trained.accelerator.run.policy.compute is None else _ROUGH
    if change == 0:
        raise WrongResultError("no update was made: every one was skipped")
    if not deviation <= allowed:
        raise WrongResultError(
            f"weights deviate by {deviation:.1e} of what training changed; at most {allowed:.0e} is right"
        )
    return f"weights deviate by {deviation:.1e} of what training changed (allowed: {allowed:.0e})"


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name].float() - other[name].float()).norm() ** 2) for name in other) ** 0.5


def _equal_weights(trained: _Trained) -> str:
    run = trained.accelerator.run
    parameters = list(trained.accelerator.unwrap_model(trained.model).parameters())
    if run.capabilities.shards_params:
        return "sharded: each rank holds a part"
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests = gather_object(run, [digest.hexdigest()])
    differing = [rank for rank, text in enumerate(digests) if text != digests[0]]
    if differing:
        raise WrongResultError(f"ranks {differing} have other weights than rank 0")
    return f"equal to the last bit on {len(digests)} rank(s)"


def _save_and_load(trained: _Trained, folder: Path) -> str:
    before = trained.weights()
    trained.accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.zero_()
    trained.accelerator.load_state(folder)
    after = trained.weights()
    if any(not torch.equal(after[name], tensor) for name, tensor in before.items()):
        raise WrongResultError("weights are not what was saved")
    return "weights come back as they were"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
