"""Backend ``ddp``: the whole model on every process, gradients averaged while they are computed.

Importing this package is light: torch is imported in the hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.plugin import Capabilities, hookimpl
from drivetrain_backends import TorchDistributedBackend
from drivetrain_ddp.config import DdpConfig, PowerSgdConfig
from drivetrain_ddp.handlers import DDPCommunicationHookType, DistributedDataParallelKwargs

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.world import Run

__version__ = "0.1.0"

__all__ = [
    "DDPCommunicationHookType",
    "Ddp",
    "DdpConfig",
    "DistributedDataParallelKwargs",
    "PowerSgdConfig",
    "__version__",
]

_NOTHING = contextlib.nullcontext()


class Ddp(TorchDistributedBackend):
    """Replicate the model with ``torch.nn.parallel.DistributedDataParallel``."""

    api = (1, 0)
    Config = DdpConfig
    default_for_many = True

    @property
    def capabilities(self) -> Capabilities:
        """Any number of models, any clipping, uneven inputs. ``distributed_type`` is known once the world is up."""
        return Capabilities(
            distributed_type="MULTI_CPU" if self._device_type == "cpu" else "MULTI_GPU",
            many_processes=True,
            one_process=False,  # one process has nothing to average: core's defaults do the same for less
            resharding=True,
            uneven_inputs=True,
        )

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Replicate it; a model without trainable parameters is made equal on all ranks and stays unwrapped."""
        from drivetrain_ddp import replica

        return replica.replicate(run, model, self.config)

    @hookimpl
    def unwrap(self, run: Run, model: nn.Module) -> nn.Module:
        """The user's module."""
        from drivetrain_ddp import replica

        return replica.inner(model)

    @hookimpl
    def accumulate(self, run: Run, models: Sequence[nn.Module], last: bool) -> contextlib.AbstractContextManager[Any]:
        """Leave gradients unreduced until the last micro-batch of the group."""
        if last:
            return _NOTHING
        from drivetrain_ddp.replica import unsynchronized  # cheaper on every step than a name of the package

        return unsynchronized(models)

    @hookimpl
    def after_step(self, run: Run, models: Sequence[nn.Module], applied: bool) -> None:  # all: no adapter on every step
        """Notice a loop that trains the model from before ``prepare``: its gradients are averaged nowhere."""
        for model in models:
            if getattr(model, "never_ran", False):
                model.refuse_gradients_of_others()

    @hookimpl
    def sync_in_backward(self, run: Run, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Average in the next backward what forwards under ``accumulate`` have left apart."""
        from drivetrain_ddp import replica

        return replica.synchronized(model)

    @hookimpl
    def join(self, run: Run, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        """Let ranks that are out of batches answer the others' collectives with zeros.

        A gradient is still divided by the number of all ranks, so each sample of the epoch has the same weight.
        """
        from drivetrain_ddp import replica

        return replica.joined(models)
