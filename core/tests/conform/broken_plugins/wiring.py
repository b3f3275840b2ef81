"""Wrong in what ``prepare`` returns."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Capabilities, hookimpl


@fails("the optimizer holds the parameters that are trained", "none of the prepared model's")
class LeavesOptimizer(Right):
    """Gives the optimizer copies of the parameters."""

    api = (1, 0)

    @hookimpl
    def wrap_optimizer(self, optimizer: Any) -> Any:
        import torch

        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
        return optimizer


@fails("the full state dict has the names", "module.0.weight")
@fails("unwrap_model gives a module with the parameter names", "has no attribute `0`", size=2)
class Prefixes(Right):
    """Calls parameters by the names of its wrapper."""

    api = (1, 0)

    @hookimpl
    def unwrap(self, model: Any) -> Any:
        return model

    @hookimpl
    def model_state(self, model: Any) -> Any:
        return {f"module.{name.removeprefix('module.')}": value for name, value in model.state_dict().items()}


@fails("a rank holds a part of the parameters", "each should hold a part", size=2)
class ClaimsShards(Right):
    """Claims to shard, and holds everything everywhere."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, shards_params=True)


@fails("prepare returns everything in the order", "kinds of what prepare returned")
class LosesLoader(Right):
    """Gives something else for a loader."""

    api = (1, 0)

    @hookimpl
    def wrap_loader(self) -> Any:
        return "loader"


@fails("what was prepared is returned as it is", "objects that became others")
class WrapsLate(Right):
    """Puts models into something that nobody knows of."""

    api = (1, 0)

    @hookimpl
    def after_prepare(self, bundle: Any) -> None:
        from torch import nn

        bundle.models = [nn.Sequential(model) for model in bundle.models]


@fails("the model is on the device of the run", "meta")
class LeavesOnMeta(Right):
    """Moves the model to no device."""

    api = (1, 0)

    @hookimpl
    def move_model(self, model: Any) -> Any:
        return model.to("meta")


@fails("a model without an optimizer can be prepared", "where is its optimizer?")
class WantsOptimizer(Right):
    """Can't prepare a model alone."""

    api = (1, 0)

    @hookimpl
    def prepare(self, optimizers: Any) -> None:
        if not optimizers:
            raise ValueError("where is its optimizer?")
