"""The scheduler ``prepare`` returns: it moves with real updates only, and by as much as they stand for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedScheduler"]

logger = logging.getLogger(__name__)


class AcceleratedScheduler:
    """Steps the user's scheduler when its optimizers really updated.

    A schedule is usually written in batches of the loader as it was before ``prepare``. With ``multiplier``
    data-parallel shards one update uses up as many of those, so it moves the scheduler by as many steps.

    Args:
        scheduler: Anything with ``step``, ``state_dict`` and ``load_state_dict``.
        optimizers: The prepared optimizers whose updates count.
        multiplier: Steps of the scheduler for one update.
        with_optimizer: Whether updates count at all; if not, ``step`` is the scheduler's own.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[AcceleratedOptimizer],
        multiplier: int = 1,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.multiplier = multiplier
        self.with_optimizer = with_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if the optimizers' last ``step`` was neither held back by accumulation nor skipped.

        Arguments, such as the metric of a plateau scheduler, make it one step whatever the multiplier: a measurement is
        taken once.
        """
        if not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        for optimizer in self.optimizers:
            if optimizer.held or optimizer.step_was_skipped:
                return
        if args or kwargs or self.multiplier == 1:
            self.scheduler.step(*args, **kwargs)
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self.multiplier):
            # A one-cycle schedule refuses to go past its end, which a multiplier may not divide.
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """State of the inner scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: being unpickled or copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheduler!r})"
