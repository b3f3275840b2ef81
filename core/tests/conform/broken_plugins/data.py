"""Wrong in which samples are seen."""

from __future__ import annotations

from typing import Any

import attrs
from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Capabilities, hookimpl


@fails("each sample of a map is seen once", size=2)
class SameShard(Right):
    """Every process takes the first shard of the data."""

    api = (1, 0)

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        return attrs.evolve(super().init_world(topology, device, collectives), data_rank=0)


@fails("each sample of a map is seen once", "samples that gather_for_metrics gave")
@fails("each sample of a stream is seen once", "samples that gather_for_metrics gave")
class DropsLast(Right):
    """Its loader leaves out the last batch."""

    api = (1, 0)

    @hookimpl
    def wrap_loader(self, loader: Any) -> Any:
        read = loader._feed.read
        loader._feed.read = lambda *args: iter(list(read(*args))[:-1])
        return loader


@fails("ranks may run out of batches", "different numbers of batches", size=2)
class ClaimsUneven(Right):
    """Claims that ranks may run out of batches, and has no way of joining them."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="RIGHT", many_processes=True, uneven_inputs=True)


@fails("an epoch that is shuffled has another order", "two epochs have the same order")
class SameOrder(Right):
    """Shuffles every epoch like the first one."""

    api = (1, 0)

    @hookimpl
    def wrap_loader(self, loader: Any) -> Any:
        read = loader._feed.read
        loader._feed.read = lambda seed, epoch, start: read(seed, 0, start)
        return loader
