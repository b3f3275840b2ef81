"""Wrong in what ranks get from each other."""

from __future__ import annotations

from typing import Any

from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import hookimpl


@fails("gather joins tensors of all ranks", "gather of float32", size=2)
@fails("tensors of different lengths are padded", "padded and gathered rows", size=2)
class GathersReversed(Right):
    """Gathers in another order."""

    api = (1, 0)

    @hookimpl
    def all_gather(self, run: Any, tensor: Any, group: Any) -> Any:
        return super().all_gather(run, tensor, group).flip(0)


@fails("reduce takes sum, mean", "reduce(mean) of float32", size=2)
class MeanIsSum(Right):
    """Forgets to divide."""

    api = (1, 0)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Any, group: Any) -> Any:
        return super().all_reduce(run, tensor, "sum" if op == "mean" else op, group)


@fails("reduce takes sum, mean", size=2)
class ReducesInPlace(Right):
    """Changes its argument."""

    api = (1, 0)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Any, group: Any) -> Any:
        return tensor.copy_(super().all_reduce(run, tensor, op, group))


@fails("broadcast sends tensors and objects", "what rank 0 got", size=2)
class BroadcastsFromZero(Right):
    """Takes rank 0 for the source."""

    api = (1, 0)

    @hookimpl
    def broadcast(self, run: Any, tensor: Any, group: Any) -> Any:
        return super().broadcast(run, tensor, 0, group)


@fails("objects are gathered in rank order", "gathered objects", size=2)
class GathersObjectsReversed(Right):
    """Gathers objects in another order."""

    api = (1, 0)

    @hookimpl
    def all_gather_object(self, run: Any, value: Any, group: Any) -> list[Any]:
        return super().all_gather_object(run, value, group)[::-1]


@fails("a flag that one rank raises is seen by all", "check_trigger", size=2)
class MaximumIsOwn(Right):
    """Takes its own value for the largest."""

    api = (1, 0)

    @hookimpl
    def all_reduce(self, run: Any, tensor: Any, op: Any, group: Any) -> Any:
        return tensor.clone() if op == "max" else super().all_reduce(run, tensor, op, group)


@fails("ranks that come to a collective with different data", "went through", size=2)
class GathersAlone(Right):
    """Takes its own value for everybody's."""

    api = (1, 0)

    @hookimpl
    def all_gather(self, run: Any, tensor: Any) -> Any:
        import torch

        return torch.stack([tensor] * run.world.size)
