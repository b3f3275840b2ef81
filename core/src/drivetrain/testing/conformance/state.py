"""Group *state*: a checkpoint loaded in fresh processes goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.launching import LAUNCHED, launch
from drivetrain.testing.conformance.recipes import WIDTH, Samples, compare, full_weights, mlp
from drivetrain.testing.conformance.subject import Subject
from drivetrain.testing.conformance.world import refusal

__all__ = ["checks"]

checks = CheckList("state")

_BEFORE, _AFTER = 3, 3
"""Batches before and after the save, in the middle of an epoch."""


@attrs.frozen
class Course:
    """How a run goes on after a save or a load, on one rank."""

    losses: list[float]
    drawn: list[float]
    """Random numbers of every generator."""
    rate: float
    steps: int

    def write(self, folder: Path, rank: int) -> None:
        """Leave it beside the checkpoint."""
        self._path(folder, rank).write_text(json.dumps(attrs.asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> Course:
        """What a rank left."""
        return cls(**json.loads(cls._path(folder, rank).read_text()))

    @staticmethod
    def _path(folder: Path, rank: int) -> Path:
        return folder.with_name(f"course-{rank}.json")


def noisy(seed: int) -> nn.Module:
    """A model whose losses depend on the random numbers drawn."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(2 * WIDTH, WIDTH))


def run_on(folder: str, fresh: bool) -> Course:
    """Train, save in the middle of an epoch and go on; or load in its place and go on."""
    from drivetrain import Accelerator, set_seed

    accelerator = Accelerator()
    set_seed(11 if fresh else 3, device_specific=True)
    model = noisy(seed=8 if fresh else 2)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=2 * accelerator.run.world.data_size, gamma=0.5)
    samples = Samples(WIDTH * (_BEFORE + _AFTER) * accelerator.run.world.data_size)
    loader = DataLoader(samples, batch_size=WIDTH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[float] = []

    def step(x: Tensor, y: Tensor) -> None:
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    if fresh:
        accelerator.load_state(folder)
    for number, (_, x, y) in enumerate(loader, start=1):
        step(x, y)
        if not fresh and number == _BEFORE:
            accelerator.save_state(folder)
            losses.clear()
    on_device = torch.rand((), device=accelerator.device).item()
    drawn = [random.random(), float(np.random.rand()), torch.rand(()).item(), on_device]
    return Course(losses, drawn, optimizer.param_groups[0]["lr"], accelerator.step)


@checks(
    "fresh processes go on from save_state with the same losses, random numbers and learning rate",
    where="largest world",
)
def goes_on(subject: Subject) -> None:
    folder = str(subject.folder / "state")
    unbroken: list[Course] = subject.run(run_on, folder, False)
    ended = launch(subject, "resume", folder)
    if ended.code != 0:
        how = "does not end" if ended.code is None else f"ends with exit code {ended.code}"
        raise Violation(f"loading in fresh processes {how}:\n{ended.tail}")
    subject.shared[LAUNCHED] = ended
    resumed = [Course.read(Path(folder), rank) for rank in range(subject.size)]
    for rank, (right, found) in enumerate(zip(unbroken, resumed, strict=True)):
        expect(len(found.losses), _AFTER, f"batches left in the epoch on rank {rank}")
        _same(found.losses, right.losses, f"losses after loading on rank {rank}")
        _same(found.drawn, right.drawn, f"random numbers (python, numpy, torch, device) after loading on rank {rank}")
        _same([found.rate], [right.rate], f"learning rate after loading on rank {rank}")
        expect(found.steps, right.steps, f"micro-batches counted on rank {rank}")


def _same(found: Sequence[float], right: Sequence[float], what: str) -> None:
    if not all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(found, right, strict=True)):
        raise Violation(f"{what} are {list(found)}, but the run that was not interrupted has {list(right)}")


def save_whole(folder: str) -> tuple[list[float], list[str]]:
    """Save a trained model, and the module inside it; differences in the files, and names in them."""
    from safetensors.torch import load_file

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(mlp())
    root = Path(folder)
    accelerator.save_model(model, root / "wrapped")
    accelerator.save_model(accelerator.unwrap_model(model), root / "unwrapped")
    accelerator.wait_for_everyone()
    one, other = (load_file(root / which / "model.safetensors") for which in ("wrapped", "unwrapped"))
    right = mlp().state_dict()
    differences = [float((one[name].float() - value).abs().max()) for name, value in right.items()]
    return differences, sorted(name for name in {**one, **other} if not torch.equal(one[name], other[name]))


@checks("save_model writes the full weights, the same for a model and for the module inside it", where="largest world")
def saved_model(subject: Subject) -> None:
    for differences, unequal in subject.run(save_whole, str(subject.folder)):
        expect(unequal, [], "weights that differ between save_model(model) and save_model(unwrap_model(model))")
        if max(differences) > subject.tolerance:
            raise Violation(f"saved weights deviate from the model's by up to {max(differences):.1e}")


# ----------------------------------------------------------------------------------------- another number of processes


def same_everywhere(folder: str, action: str, updates: int) -> dict[str, Tensor]:
    """Train on one batch that all ranks share, so that the number of ranks makes no difference; save or load first."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = mlp()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.01))
    if action == "load":
        accelerator.load_state(folder)
    _updates(model, optimizer, updates, accelerator)
    if action == "save":
        accelerator.save_state(folder)
    return full_weights(accelerator, model)


def _updates(model: Any, optimizer: Any, count: int, accelerator: Any = None) -> None:
    samples = Samples(WIDTH)
    x, y = (samples.x, samples.y) if accelerator is None else accelerator.place((samples.x, samples.y))
    for _ in range(count):
        loss = mse_loss(model(x), y)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def own_format(subject: Subject) -> str | None:
    """Why loading with another number of processes is not this backend's affair."""
    if not subject.facts.capabilities.many_processes:
        return "the backend works with one process only"
    if not subject.facts.capabilities.resharding and "load_state" not in subject.facts.owners:
        return "resharding is not claimed, and checkpoints have the core's own format"
    if another_size(subject) is None:
        return f"no other number of processes can be had here: {refusal(subject, subject.size + 1)}"
    return None


def another_size(subject: Subject) -> int | None:
    """A number of processes that the settings allow too: one more if possible, else fewer, else up to twice as many."""
    least = 1 if subject.facts.capabilities.one_process else 2
    fewer, more = range(subject.size - 1, least - 1, -1), range(subject.size + 2, 2 * subject.size + 1)
    return next((size for size in (subject.size + 1, *fewer, *more) if refusal(subject, size) is None), None)


@checks(
    "another number of processes can load a checkpoint where that is claimed, and it is refused where it is not",
    unclaimed=own_format,
    where="largest world",
)
def resharding(subject: Subject) -> None:
    another = another_size(subject)
    assert another is not None, "own_format"
    for size, other in ((subject.size, another), (another, subject.size)):
        folder = str(subject.folder / f"from-{size}")
        subject.run(same_everywhere, folder, "save", 3, size=size)
        loading = attrs.evolve(subject, size=other)
        if not subject.facts.capabilities.resharding:
            loading.refuse(same_everywhere, folder, "load", 0, what=_loading(size, other), error="CheckpointError")
            continue
        found = loading.run(same_everywhere, folder, "load", 2)[0]
        model = mlp()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        _updates(model, AdamW(model.parameters(), lr=0.01), 5)
        compare(subject, found, dict(model.state_dict()), start)


def _loading(size: int, other: int) -> str:
    return f"loading with {other} process(es) what {size} saved, which is not claimed (resharding=False),"
