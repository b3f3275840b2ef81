"""Wrong in what they save and load."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import hookimpl


@fails("save_model writes the full weights", "saved weights deviate")
class HalfState(Right):
    """Forgets the last weights of a model."""

    api = (1, 0)

    @hookimpl
    def model_state(self, model: Any) -> Any:
        state = self.unwrap(model).state_dict()
        return {name: value * 0 if name == list(state)[-1] else value for name, value in state.items()}


@fails("another number of processes can load", "saved by another number of processes")
class ClaimsResharding(Right):
    """Claims that checkpoints can be loaded by any number of processes."""

    api = (1, 0)

    @hookimpl
    def load_state(self, run: Any, bundle: Any, directory: Any, strict: bool) -> None:
        from drivetrain import defaults

        if run.world.size != len(list(directory.parent.glob("**/rng-*.json"))) and run.world.size == 2:
            raise OSError("saved by another number of processes")
        defaults.load_state(run, bundle, directory, strict)


@fails("fresh processes go on from save_state", "losses after loading on rank 0")
class ForgetsOptimizers(Right):
    """Loads models, and leaves optimizers as they are."""

    api = (1, 0)

    @hookimpl
    def load_state(self, run: Any, bundle: Any, directory: Any, strict: bool) -> None:
        from copy import deepcopy

        from drivetrain import defaults

        before = [deepcopy(optimizer.state_dict()) for optimizer in bundle.optimizers]
        defaults.load_state(run, bundle, directory, strict)
        for optimizer, state in zip(bundle.optimizers, before, strict=True):
            optimizer.load_state_dict(state)
