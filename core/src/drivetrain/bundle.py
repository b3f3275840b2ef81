"""What must be wired together: the models, optimizers, loaders and schedulers of one ``prepare`` call.

Converting, moving and sharding may all replace parameters. A bundle remembers which parameter was which by name, so
that core can restore ties and point optimizers at what is really trained: an optimizer left behind would train nothing
without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import nn
from torch.optim import Optimizer

__all__ = ["Bundle", "ParameterName"]

ParameterName = tuple[int, str]
"""Index of a model in the bundle, and the parameter's qualified name in it."""


@attrs.define(eq=False, kw_only=True)
class Bundle:
    """Objects in the order in which the user gave them. Hooks see them as they are at that moment."""

    models: list[nn.Module] = attrs.field(factory=list)
    optimizers: list[Optimizer] = attrs.field(factory=list)
    loaders: list[Any] = attrs.field(factory=list)
    schedulers: list[Any] = attrs.field(factory=list)
    names: list[list[list[ParameterName | None]]] = attrs.field(factory=list)
    """For each optimizer and parameter group the names of its parameters; None for one of no model in the bundle."""
    aliases: list[list[ParameterName]] = attrs.field(factory=list)
    """Every set of names, over all models, that one tied parameter had."""
    kinds: list[str] = attrs.field(factory=list)
    """Name of each model's class as the user wrote it: an engine may put a subclass of its own in its place."""
    taken_over: frozenset[int] = frozenset()
    """Models that the user's own code saves or loads; the hooks of state leave them out."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in a group, of the Accelerator that prepares."""
    shared_storage: bool = True
    """Whether all processes see the same files. If not, the first process of each machine writes what is common."""

    def record(self) -> None:
        """Note names and ties, before anything is converted or moved."""
        known: dict[int, list[ParameterName]] = {}
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                known.setdefault(id(parameter), []).append((index, name))
        self.aliases = [names for names in known.values() if len(names) > 1]
        self.names = [
            [[known[id(p)][0] if id(p) in known else None for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def model_label(self, index: int) -> str:
        """What a model is called in messages."""
        kind = self.kinds[index] if self.kinds else type(self.models[index]).__name__
        return f"model {index} ({kind})"

    def parameters(self) -> dict[ParameterName, nn.Parameter]:
        """Every parameter by its names, as they are now. ``models`` must be unwrapped ones."""
        return {
            (index, name): parameter
            for index, model in enumerate(self.models)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def retie(self) -> int:
        """Make every set of tied names one parameter again; returns how many names had come loose."""
        loose = 0
        for first, *others in self.aliases:
            parameter = self.models[first[0]].get_parameter(first[1])
            for index, name in others:
                path, _, leaf = name.rpartition(".")
                owner = self.models[index].get_submodule(path)
                if getattr(owner, leaf) is not parameter:
                    setattr(owner, leaf, parameter)
                    loose += 1
        return loose

    def repoint(self, unwrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> int:
        """Point optimizers at the parameters the models have now; returns how many had been replaced.

        Args:
            unwrap: Gives the module whose parameter names are the recorded ones.
        """
        replaced = 0
        bare = [unwrap(model) for model in self.models]
        for optimizer, groups in zip(self.optimizers, self.names, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                for position, name in enumerate(names):
                    if name is None:
                        continue
                    old, new = group["params"][position], bare[name[0]].get_parameter(name[1])
                    if old is new:
                        continue
                    replaced += 1
                    group["params"][position] = new
                    if old in optimizer.state:
                        optimizer.state[new] = optimizer.state.pop(old)
        return replaced

    def models_of(self, optimizer: int) -> list[nn.Module]:
        """The bundle's models that an optimizer holds parameters of, in order."""
        indices = sorted({name[0] for group in self.names[optimizer] for name in group if name is not None})
        return [self.models[index] for index in indices]

    def strangers(self, optimizer: int) -> list[Any]:
        """Parameters of an optimizer that belong to no model of the bundle."""
        return [
            parameter
            for group, names in zip(self.optimizers[optimizer].param_groups, self.names[optimizer], strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
            if name is None
        ]
