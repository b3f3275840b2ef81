"""Local SGD: ranks train by themselves and meet now and then (Stich, ICLR 2019)."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """Context in which gradients are not reduced; instead the weights are averaged every so many steps, and at the end.

    Call :meth:`step` after each update. Optimizer state stays each rank's own.

    Args:
        accelerator: It prepared the model.
        model: The prepared model.
        local_sgd_steps: Updates from one average to the next; None, if it is not enabled.
        enabled: False trains as without this context.

    Raises:
        DrivetrainError: The backend does not keep a whole model with its own optimizer on every rank.
        ValueError: ``local_sgd_steps`` is below 1 where it is enabled.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int | None, enabled: bool = True
    ) -> None:
        if enabled and (local_sgd_steps is None or local_sgd_steps < 1):
            raise ValueError(f"local_sgd_steps must be at least 1; got {local_sgd_steps}")
        self.enabled = enabled and accelerator.use_distributed
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        """Updates since the weights were averaged."""
        self._apart = contextlib.ExitStack()
        run = accelerator.run
        if self.enabled and (run.capabilities.shards_params or run.hooks.owner("prepare") is not None):
            raise DrivetrainError(
                f"LocalSGD needs the whole model and an optimizer of its own on every rank, which backend "
                f"{run.names['backend']!r} does not keep"
            )

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._apart.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._apart.close()
        if self.enabled and error is None and self.num_steps:
            self._average()

    def step(self) -> None:
        """One update was made; average the weights if it is time to."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps == self.local_sgd_steps:
            self._average()

    def _average(self) -> None:
        self.num_steps = 0
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.accelerator.unwrap_model(self.model).parameters():
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        with torch.no_grad():
            for parameters in by_dtype.values():  # one collective for all, not one for each
                mean = self.accelerator.reduce(parameters_to_vector(parameters), "mean")
                vector_to_parameters(mean, parameters)
