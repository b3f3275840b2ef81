"""Stand-ins for an optimizer and a schedule that the engine's own configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.errors import DrivetrainError

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim(Optimizer):
    """Says which parameters the optimizer of the engine's configuration is to train.

    Args:
        params: Parameters or groups, as for any optimizer.
        lr: Fills in ``"lr": "auto"``.
        weight_decay: Fills in ``"weight_decay": "auto"``.
        **kwargs: Fill in what is ``auto`` under their names, such as ``betas`` and ``eps``.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0.0, **kwargs: Any) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """Never called under backend ``deepspeed``, where the engine's optimizer steps instead.

        Raises:
            DrivetrainError: Always.
        """
        raise DrivetrainError(
            "a DummyOptim trains nothing: it stands for the optimizer of the engine's configuration, and needs backend "
            "deepspeed with one in deepspeed.config_file"
        )


class DummyScheduler(LRScheduler):
    """Stands for the schedule of the engine's configuration, or one made later.

    It counts updates: one ``step()`` of the prepared one moves it by one, whatever the number of processes.

    Args:
        optimizer: The optimizer or its stand-in.
        total_num_steps: Fills in ``"total_num_steps": "auto"``; in updates.
        warmup_num_steps: Fills in ``"warmup_num_steps": "auto"``; in updates.
        lr_scheduler_callable: Makes the schedule from the optimizer, where the configuration has none.
        **kwargs: Fill in what is ``auto`` under their names.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # The base's __init__ is left out on purpose: it would take a step, and there is no schedule to take it on.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> None:
        """Never called under backend ``deepspeed``.

        Raises:
            DrivetrainError: Always.
        """
        raise DrivetrainError(
            "a DummyScheduler moves nothing: it stands for the schedule of the engine's configuration, and needs "
            "backend deepspeed with one in deepspeed.config_file, or lr_scheduler_callable"
        )
