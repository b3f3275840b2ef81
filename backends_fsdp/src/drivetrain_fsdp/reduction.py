"""When gradients are reduced over ranks, and how those of parameters that stay whole are."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from drivetrain.world import Run

__all__ = ["Sharded", "average_in_backward", "switched"]


@attrs.define(eq=False)
class Sharded:
    """What is known of a model that was cut."""

    whole: tuple[nn.Parameter, ...]
    """Its parameters that stay whole on each rank."""
    reduces: bool = True
    """Whether the next backward reduces gradients."""


def average_in_backward(run: Run, sharded: Sharded) -> None:
    """Replace gradients of parameters that stay whole by their mean over all ranks, as soon as they are computed."""
    # A parameter that its own hook refers to is never freed: Python's collector does not see into a tensor's hooks.
    known = weakref.ref(sharded)

    def average(parameter: Tensor) -> None:
        found = known()
        if found is not None and found.reduces and parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.copy_(run.hooks.all_reduce(run=run, tensor=parameter.grad, op="mean", group=None))

    for parameter in sharded.whole:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)


@contextlib.contextmanager
def switched(
    known: Mapping[nn.Module, Sharded],
    models: Sequence[nn.Module],
    reduces: bool,
    switch: Callable[[nn.Module, bool], None],
) -> Iterator[None]:
    """Context in which the backward of these models reduces gradients, or does not.

    Args:
        known: Every model that was cut.
        models: Some of them; others are passed over.
        reduces: Whether it does.
        switch: Tells the engine.
    """
    changed = [(model, known[model]) for model in models if model in known and known[model].reduces is not reduces]
    try:
        for model, sharded in changed:
            sharded.reduces = reduces
            switch(model, reduces)
        yield
    finally:
        for model, sharded in changed:
            sharded.reduces = not reduces
            switch(model, not reduces)
