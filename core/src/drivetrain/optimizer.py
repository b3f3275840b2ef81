"""The optimizer ``prepare`` returns: the user's own behind the gate of gradient accumulation and the loss scaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.gradients import Gradients

__all__ = ["AcceleratedOptimizer"]

# What the base class would do to attributes this wrapper does not have; it is the inner optimizer's business.
_PASSED_ON = (
    "add_param_group",
    "load_state_dict",
    "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_step_post_hook",
    "register_step_pre_hook",
    "state_dict",
)


class _Stepper:
    """What a gradient scaler sees as the optimizer: its ``step`` is the hook, and it tells whether that ran."""

    def __init__(self, owner: AcceleratedOptimizer) -> None:
        self._owner = owner
        self._applied: bool | None = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._owner.param_groups

    def step(self) -> None:
        self._applied = self._owner.gradients.step_hook(self._owner.optimizer)

    def through(self, scaler: Any) -> bool | None:
        """Step unless the scaler saw an overflow; returns whether parameters were updated."""
        self._applied = False
        scaler.step(self)
        return self._applied


class AcceleratedOptimizer(Optimizer):
    """Steps only at the end of a group of micro-batches, and skips when the loss scaler saw an overflow.

    Everything else is the inner optimizer's, reachable as ``optimizer`` too: state, parameter groups, hooks, and any
    attribute of its own.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, models: Sequence[nn.Module]) -> None:
        # The base's __init__ is left out on purpose: it would build a second state beside the inner optimizer's.
        self.optimizer = optimizer
        self.gradients = gradients
        self.models = models
        self.stepper = _Stepper(self)
        self.backwards = 0
        """How many backwards of the Accelerator there had been at the last update."""
        self.finished = False
        """Whether this group's gradients are unscaled and rescaled already."""
        self.held = False
        """Whether the last ``step`` was held back by gradient accumulation."""
        self.step_was_skipped = False
        """Whether the last ``step`` was due but did not update, because of an overflow or at the engine's decision."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters if a group of micro-batches ends here; else do nothing.

        Args:
            closure: As torch's optimizers take it. Neither with loss scaling nor with gradient accumulation.

        Returns:
            What the closure returned when it was first called; None without one.

        Raises:
            DrivetrainError: A closure can't be had here.
        """
        if closure is not None:
            return self._step_with(closure)
        if not self.gradients.gate.frame.sync:
            self.held = True
            return None
        self.held = False
        self.step_was_skipped = not self.gradients.step(self, None)
        self.finished = False
        return None

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if self.gradients.gate.steps > 1:
            raise DrivetrainError(
                "optimizer.step(closure) can't be combined with gradient accumulation: the closure computes the loss "
                "of one micro-batch again, and the others of its group would be lost. Use an optimizer without "
                "closure, or gradient_accumulation_steps=1 and a closure that goes through the group itself"
            )
        results: list[Any] = []

        def kept() -> Any:
            results.append(closure())
            return results[-1]

        self.held = False
        self.step_was_skipped = not self.gradients.step(self, kept)
        self.finished = False
        return results[0] if results else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless the last ``step`` was held back by accumulation: then they are still needed."""
        if not self.held:
            self.gradients.zero_grad(self, set_to_none)

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for group in self.param_groups for p in group["params"])

    def train(self) -> None:
        """Passed on to optimizers that have modes of their own (schedule-free ones)."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Passed on to optimizers that have modes of their own (schedule-free ones)."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: being unpickled or copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _pass_on(name: str) -> Any:
    def passed(self: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    passed.__name__ = name
    passed.__doc__ = f"``{name}`` of the inner optimizer."
    return passed


for _name in _PASSED_ON:
    setattr(AcceleratedOptimizer, _name, _pass_on(_name))
