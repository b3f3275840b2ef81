"""Wrong in what they say of the world they bring up."""

from __future__ import annotations

from typing import Any

import attrs
from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Capabilities, hookimpl


@fails("the run comes up", "no cable")
class NoWorld(Right):
    """Can't communicate."""

    api = (1, 0)

    @hookimpl
    def init_world(self, topology: Any) -> Any:
        raise OSError("no cable")


@fails("several shards have a distributed type", "'NO'", size=2)
class Nameless(Right):
    """Distributes, and says that it does not."""

    api = (1, 0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(distributed_type="NO", many_processes=True)


@fails("ranks, sizes and data shards fit together", "5 data shards can't be fed", size=2)
class FeedsNobody(Right):
    """Has more shards of data than its processes feed."""

    api = (1, 0)

    @hookimpl
    def init_world(self, topology: Any, device: Any, collectives: Any) -> Any:
        return attrs.evolve(super().init_world(topology, device, collectives), data_size=5)
