"""What an Accelerator has prepared so far, and how to recognise it when it comes again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.bundle import Bundle
from drivetrain.errors import DrivetrainError
from drivetrain.optimizer import AcceleratedOptimizer
from drivetrain.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["Prepared", "PreparedModel"]


@attrs.frozen(eq=False)
class PreparedModel:
    """A model as the user gave it, and what ``prepare`` made of it."""

    original: nn.Module
    wrapped: nn.Module
    kind: str
    """Name of the original's class when it was given. Engines may change that in place."""


class Prepared:
    """Everything one Accelerator prepared, in the order in which it did."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.models: list[PreparedModel] = []
        self.wrapped_models: list[nn.Module] = []
        """The models as the user holds them. The same list object for the Accelerator's whole life."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[Any] = []
        self._sources: list[tuple[Any, Any]] = []
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._returned: set[int] = set()

    def find(self, thing: Any) -> Any:
        """What stands for ``thing`` if it was prepared before, be it the prepared object or its source; else None."""
        if isinstance(thing, (AcceleratedOptimizer, AcceleratedScheduler)):
            return thing
        for source, made in self._sources:
            if thing is source or thing is made:
                return made
        return None

    def keep_models(self, originals: list[nn.Module], bundle: Bundle) -> None:
        """Remember models, before anything that refers to them is wired."""
        for original, wrapped, kind in zip(originals, bundle.models, bundle.kinds, strict=True):
            self.models.append(PreparedModel(original, wrapped, kind))
            self.wrapped_models.append(wrapped)
            self._sources.append((original, wrapped))

    def keep(self, kind: str, sources: list[Any], made: list[Any]) -> None:
        """Remember optimizers, loaders or schedulers."""
        getattr(self, kind).extend(made)
        self._sources.extend(zip(sources, made, strict=True))

    def bundle(self) -> Bundle:
        """Everything prepared so far, with the names of all parameters as the users' modules have them."""
        whole = Bundle(
            models=[self._bare(model.wrapped) for model in self.models],
            optimizers=[optimizer.optimizer for optimizer in self.optimizers],
            loaders=list(self.loaders),
            schedulers=list(self.schedulers),
            kinds=[model.kind for model in self.models],
        )
        whole.record()
        whole.models = list(self.wrapped_models)
        return whole

    def forget(self) -> None:
        """Let go of everything, so that its memory can be freed; what plugins keep of it too."""
        optimizers = [optimizer.optimizer for optimizer in self.optimizers]
        self._run.hooks.release(run=self._run, models=list(self.wrapped_models), optimizers=optimizers)
        for kept in (self.models, self.wrapped_models, self.optimizers, self.schedulers, self.loaders, self._sources):
            kept.clear()
        self._replaced = WeakIdKeyDictionary()
        self._returned.clear()

    # ------------------------------------------------------------------------------------------------- parameters

    def note_replaced(self, pairs: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Remember parameters that preparing a model replaced, for optimizers that are prepared later."""
        for old, new in pairs.items():
            if old is not new:
                self._replaced[old] = new

    def replacement(self, parameter: Any) -> Any:
        """The parameter that is trained in place of this one; itself if it was not replaced."""
        return self._replaced.get(parameter, parameter)

    def owned(self) -> set[int]:
        """Ids of the parameters of all prepared models."""
        return {id(p) for model in self.models for p in self._bare(model.wrapped).parameters()}

    def models_with(self, optimizer: Optimizer) -> list[nn.Module]:
        """Prepared models an optimizer holds parameters of."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [
            model.wrapped
            for model in self.models
            if any(id(p) in wanted for p in self._bare(model.wrapped).parameters())
        ]

    def check_returned(self, models: Sequence[nn.Module]) -> None:
        """Refuse models as they were before ``prepare`` wrapped them: ranks would drift apart in silence.

        Raises:
            DrivetrainError: One of them is the model as it was before ``prepare``.
            TypeError: One of them is no model.
        """
        for model in models:
            if id(model) in self._returned:
                continue
            if not isinstance(model, nn.Module):
                raise TypeError(f"only models can be named, each as an argument of its own; got {type(model).__name__}")
            if any(model is known.original and model is not known.wrapped for known in self.models):
                raise DrivetrainError(
                    f"this {type(model).__name__} is the model that was given to prepare, not the one it returned; "
                    f"train on what prepare returns: model, ... = accelerator.prepare(model, ...)"
                )
            self._returned.add(id(model))

    def model_of(self, module: nn.Module) -> PreparedModel | None:
        """The prepared model a module is, or was unwrapped from."""
        for model in self.models:
            if module is model.wrapped or module is model.original or module is self._bare(model.wrapped):
                return model
        return None

    def _bare(self, model: nn.Module) -> nn.Module:
        bare: nn.Module = self._run.hooks.unwrap(run=self._run, model=model)
        return bare
