"""Wrong in how they clip gradients."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Capabilities, hookimpl


@fails("gradients are clipped by the global 2-norm")
@fails("the norm that clips is that of the accumulated")
class ClipIgnored(Right):
    """Measures the norm, and clips nothing."""

    api = (1, 0)

    @hookimpl
    def clip_grad_norm(self, parameters: Any, norm_type: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, float("inf"), norm_type)


@fails("gradients are clipped by the global 2-norm")
class ClipRemembered(Right):
    """Clips by the first bound it was ever given."""

    api = (1, 0)
    bound: float | None = None

    @hookimpl
    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Any:
        import torch

        self.bound = max_norm if self.bound is None else self.bound
        return torch.nn.utils.clip_grad_norm_(parameters, self.bound, norm_type)


@fails("gradients are clipped by the global 1-norm", "norms of the gradients on rank 0")
@fails("gradients are clipped by the global maximum norm", "norms of the gradients on rank 0")
class ClipAlwaysTwo(Right):
    """Takes every norm for the 2-norm."""

    api = (1, 0)

    @hookimpl
    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


@fails("gradients are clipped by value")
class ClipValueIgnored(Right):
    """Clamps nothing."""

    api = (1, 0)

    @hookimpl
    def clip_grad_value(self) -> None:
        pass


@fails("a part of a model is clipped alone", "norms of the gradients")
class ClipsWhole(Right):
    """Clips the whole model, whatever part was meant."""

    api = (1, 0)

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> Any:
        self.model = model
        return super().wrap_model(run, model)

    @hookimpl
    def clip_grad_norm(self, max_norm: float, norm_type: float) -> Any:
        import torch

        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)


@fails("gradients are clipped by the global maximum norm", "only the 2-norm")
class ClaimsInfNorm(Right):
    """Claims a norm it can't measure."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, clip_norms=frozenset({2.0, float("inf")}))

    @hookimpl
    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Any:
        import torch

        if norm_type != 2.0:
            raise ValueError("only the 2-norm")
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
