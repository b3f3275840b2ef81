"""Activation checkpointing without a wrapper, so that parameter names stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["RecomputedForward"]


class RecomputedForward:
    """Stands in for ``module.forward``: keeps the inputs alone, and runs it again when backward needs what is inside.

    It is inside of the module's hooks, so what gathers and frees the module's parameters is not run twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        """A forward that was on the instance; None if it is the class's."""

    @classmethod
    def install(cls, module: nn.Module) -> None:
        """Put one on a module, unless it has one."""
        if not isinstance(module.__dict__.get("forward"), cls):
            module.forward = cls(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        return checkpoint(self._run, *args, use_reentrant=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputedForward:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.module, copied.replaced = deepcopy(self.module, memo), deepcopy(self.replaced, memo)
        return copied
