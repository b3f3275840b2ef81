"""Training while ranks have different numbers of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.data.loader import DataLoaderShard
from drivetrain.errors import DrivetrainError
from drivetrain.nested import map_tensors

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["join_uneven_inputs"]


@contextlib.contextmanager
def join_uneven_inputs(
    accelerator: Accelerator, joinables: nn.Module | Sequence[nn.Module], even_batches: bool | None
) -> Iterator[None]:
    """See ``Accelerator.join_uneven_inputs``."""
    even = accelerator.even_batches if even_batches is None else even_batches
    models = [joinables] if isinstance(joinables, nn.Module) else list(joinables)
    strangers = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
    if strangers:
        raise TypeError(f"join_uneven_inputs takes prepared models; got {', '.join(strangers)}")
    accelerator.known.check_returned(models)
    with contextlib.ExitStack() as loaders:
        if even_batches is not None:
            for loader in accelerator.known.loaders:
                if isinstance(loader, DataLoaderShard):
                    loaders.enter_context(loader.evening(even))
        if even or accelerator.num_processes == 1:
            yield
            return
        _check_accumulation(accelerator)
        before = accelerator.gate.batches
        with accelerator.run.hooks.join(run=accelerator.run, models=models):
            yield
        _agree(accelerator, accelerator.gate.batches - before)


def _check_accumulation(accelerator: Accelerator) -> None:
    """A rank that ends in the middle of a group has gradients that the others' groups could not be reduced with."""
    if accelerator.gradient_accumulation_steps > 1:
        raise DrivetrainError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} can't be combined with uneven "
            f"inputs: ranks would end their last groups at different times. Use 1, or leave even_batches on"
        )


def _agree(accelerator: Accelerator, batches: int) -> None:
    """Give every rank the optimizers, schedulers and loss scale of a rank that trained to the end.

    The backend makes the weights equal. A rank that was out of batches early has missed the last updates in everything
    else, and would train differently from the others after this.
    """
    run, known = accelerator.run, accelerator.known
    mine = torch.tensor([batches], device=run.world.device)
    counts: list[int] = run.hooks.all_gather(run=run, tensor=mine, group=None).flatten().tolist()
    if len(set(counts)) == 1:
        return
    source = counts.index(max(counts))
    accelerator.gradients.update_scale()
    things: list[Any] = [
        *(optimizer.optimizer for optimizer in known.optimizers),
        *(scheduler.scheduler for scheduler in known.schedulers),
        *([] if accelerator.scaler is None else [accelerator.scaler]),
    ]
    for thing in things:
        state = map_tensors(lambda tensor: tensor.cpu(), thing.state_dict()) if run.world.rank == source else None
        state = run.hooks.broadcast_object(run=run, value=state, source=source, group=None)
        if run.world.rank != source:
            thing.load_state_dict(state)
