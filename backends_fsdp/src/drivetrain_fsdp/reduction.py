"""When gradients are reduced over ranks, and how those of parameters that stay whole are."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drivetrain.logging import get_logger
from drivetrain.world import Run

__all__ = ["Sharded", "average_in_backward", "switched", "watch_outside_forward"]

logger = get_logger("drivetrain.fsdp")


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


def watch_outside_forward(model: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Say once when gradients are computed on cut parameters themselves, which forward never does.

    torch's backward sets their ``.grad`` after reducing it; autograd only reaches them from code outside of forward. A
    penalty on the weights may do that. A loss computed by another method may not, and nothing else would tell.

    Args:
        model: Class of the user's module.
        parameters: Those that were cut, by name.
    """
    handles: list[Any] = []

    def say(name: str, gradient: Tensor) -> None:
        for handle in handles:
            handle.remove()
        logger.warning(
            "a gradient of %s, a sharded parameter of %s, was computed outside of the model's forward, where nothing "
            "is averaged over the ranks. That is right for a penalty that is the same on all of them; a loss must be "
            "computed by calling model(...), not a method of it",
            name,
            model,
        )

    for name, parameter in parameters:
        if parameter.requires_grad:
            # Not register_post_accumulate_grad_hook: torch calls those itself after it has reduced.
            handles.append(parameter.register_hook(functools.partial(say, name)))


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
