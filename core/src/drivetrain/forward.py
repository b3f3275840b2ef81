"""Autocast around a prepared model's forward, and its outputs in the dtype the policy promises."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from drivetrain.handlers import AutocastKwargs
from drivetrain.nested import cast_floats

__all__ = ["AutocastForward", "autocast"]


@contextlib.contextmanager
def autocast(
    fresh: Callable[[], contextlib.AbstractContextManager[Any]], handler: AutocastKwargs | None
) -> Iterator[None]:
    """The context of the hook ``autocast``, as far as the user's settings allow.

    Args:
        fresh: Makes the hook's context; not called where it is switched off.
        handler: The user's settings; None: all as it comes.
    """
    if handler is not None and not handler.enabled:
        yield
        return
    with fresh():
        if handler is None or handler.cache_enabled:
            yield
            return
        was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(was)


class AutocastForward:
    """Stands in for ``model.forward``.

    It holds the model rather than a bound method: a deep copy of the model (an EMA, say) then runs its own weights, and
    not those of the model it was copied from.

    Args:
        model: Its ``forward`` becomes this object.
        context: Opens a fresh autocast context for a model.
        output: Half-precision outputs are cast to it; None leaves them.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
        output: torch.dtype | None,
    ) -> None:
        self.model = model
        self.context = context
        self.output = output
        self.replaced: Callable[..., Any] | None = model.__dict__.get("forward")
        """A forward the user had put on the instance; None if it is the class's."""

    @classmethod
    def install(
        cls,
        model: nn.Module,
        context: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
        output: torch.dtype | None,
    ) -> None:
        """Put one on a model, unless it has one."""
        if not isinstance(model.__dict__.get("forward"), cls):
            model.forward = cls(model, context, output)

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Give a model its own forward back."""
        installed = model.__dict__.get("forward")
        if isinstance(installed, cls):
            del model.forward
            if installed.replaced is not None:
                model.forward = installed.replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context(self.model):
            if self.replaced is None:
                outputs = type(self.model).forward(self.model, *args, **kwargs)
            else:
                outputs = self.replaced(*args, **kwargs)
        return outputs if self.output is None else cast_floats(outputs, self.output)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own forward, for code that looks at which arguments a model takes."""
        return inspect.signature(_own_forward(self.model) if self.replaced is None else self.replaced)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model has its own forward again: what loads it may be another run, or none."""
        return (_own_forward, (self.model,)) if self.replaced is None else (_same, (self.replaced,))

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastForward:
        from copy import deepcopy

        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.model = deepcopy(self.model, memo)
        copied.context, copied.output = self.context, self.output
        copied.replaced = deepcopy(self.replaced, memo)
        return copied


def _own_forward(model: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(model).forward, model)


def _same(value: Any) -> Any:
    return value
