"""Group *precision*: a precision that works with the backend and device trains; another is refused in good time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import attrs
import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD

from drivetrain import registry
from drivetrain.testing.conformance.checks import CheckList, ConformanceCheck, Violation, expect
from drivetrain.testing.conformance.recipes import WIDTH, Samples, mlp
from drivetrain.testing.conformance.subject import Subject, gentle_scale

__all__ = ["checks"]


class _OnePerPrecision(CheckList):
    """A check for each precision that is installed when they are asked for."""

    def __iter__(self) -> Iterator[ConformanceCheck]:
        return (_check(name) for name in sorted(registry.entries()["precision"]))


checks = _OnePerPrecision("precision")

_UPDATES = 12


def fall() -> list[float]:
    """Train on the same batch again and again; the losses."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = mlp()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    samples = Samples(WIDTH)
    x, y = accelerator.place((samples.x, samples.y))
    losses = []
    for _ in range(_UPDATES):
        loss = mse_loss(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@attrs.frozen
class Refused:
    """What a refused run left behind on one rank."""

    message: str
    """Empty if it was not refused."""
    process_group: bool
    running: bool


def try_to_start() -> Refused:
    """Start a run that should be refused."""
    from drivetrain import Accelerator, state
    from drivetrain.errors import DrivetrainError

    message = ""
    try:
        Accelerator()
    except DrivetrainError as error:
        message = str(error)
    return Refused(message, torch.distributed.is_initialized(), state.current() is not None)


@functools.cache
def _check(name: str) -> ConformanceCheck:
    def broken(subject: Subject) -> str | None:
        return subject.pairs[name].broken

    def run(subject: Subject) -> None:
        config = {"mixed_precision": name, **gentle_scale(name)}
        refusal = subject.pairs[name].refusal
        if refusal is None:
            for rank, losses in enumerate(subject.run(fall, config=config)):
                if not losses[-1] < 0.8 * losses[0]:
                    raise Violation(f"the loss does not fall on rank {rank}: {[round(loss, 4) for loss in losses]}")
            return
        for rank, found in enumerate(subject.run(try_to_start, config=config)):
            if refusal not in found.message:
                raise Violation(f"it should be refused on rank {rank} since {refusal}; the error is: {found.message!r}")
            expect(found.running, False, f"a run is left on rank {rank} after it was refused")
            expect(found.process_group, False, f"a process group was made on rank {rank} before it was refused")

    title = f"{name} trains to a falling loss, or is refused with its reason before anything is allocated"
    return ConformanceCheck(title, checks.group, run, broken, where="largest world")
