"""Graphs: where they end, how many there are, and a word to users whose loop makes new ones all the time."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from drivetrain.nested import leaves

__all__ = ["Graphs"]

logger = logging.getLogger("drivetrain.xla")

READS = ("aten::_local_scalar_dense",)
"""What the engine counts as computed on the host and is no computation: ``tensor.item()``."""

WARM_UP = 8
"""Updates after which a loop is expected to have shown all graphs it has. Two optimizers and accumulation fit in."""


class Graphs:
    """Cuts graphs and counts them.

    Operations on XLA tensors are recorded and run when the graph is cut. A graph that was seen before runs at once; a
    new one is compiled first, which takes seconds to minutes. Shapes and Python numbers are a part of it.

    Args:
        limit: Graphs compiled anew, after the first updates, before a warning; 0: never.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._updates = 0
        self._known = self.compiled
        self._late = 0
        self._warned = limit == 0
        self._shapes: dict[tuple[tuple[int, ...], ...], int] = {}

    @property
    def compiled(self) -> int:
        """Graphs compiled in this process."""
        import torch_xla.debug.metrics as metrics

        return _count(metrics.metric_data("CompileTime"))

    @property
    def executed(self) -> int:
        """Graphs run in this process."""
        import torch_xla.debug.metrics as metrics

        # Under SPMD a graph runs on several devices, which is counted under another name.
        return sum(_count(metrics.metric_data(name)) for name in ("ExecuteTime", "ExecuteReplicatedTime"))

    def cut(self) -> None:
        """End the graph here and start computing it; does not wait for that."""
        import torch_xla

        torch_xla.sync()

    def saw(self, batch: Any) -> None:
        """Note the shapes of a batch, for the warning that may have to speak of them."""
        if self._warned:
            return
        key = tuple(tuple(leaf.shape) for leaf in leaves(batch) if isinstance(leaf, Tensor))
        self._shapes[key] = self._shapes.get(key, 0) + 1

    def stepped(self) -> None:
        """Note an update; warn once where new graphs don't stop."""
        self._updates += 1
        known, self._known = self._known, self.compiled
        if self._warned or self._updates <= WARM_UP:
            return
        self._late += self._known - known
        if self._late >= self._limit:
            self._warned = True
            logger.warning("%s", self._advice())

    def _advice(self) -> str:
        head = (
            f"{self._late} graphs were compiled anew after update {WARM_UP}, {self._known} in all: training waits for "
            f"the compiler. "
        )
        if len(self._shapes) > 2:
            seen = ", ".join(
                str(list(map(list, key))) for key in sorted(self._shapes, key=self._shapes.__getitem__)[:4]
            )
            return (
                f"{head}Batches come in {len(self._shapes)} sets of shapes, and each is compiled for itself; rare ones "
                f"are {seen}. Pad in the collate function, to one length or to a few, keep drop_last or even_batches "
                f"on, and pad_across_processes what is gathered"
            )
        return (
            f"{head}The batches' shapes do not change, so something else does: a Python number that differs in each "
            f"step (make it a tensor on the device), a branch on a value, or tensors whose shape depends on values. "
            f"PT_XLA_DEBUG_LEVEL=2 says where each graph comes from"
        )

    def summary(self) -> str:
        """One line for the log."""
        import torch_xla.debug.metrics as metrics

        fallen = sorted(name for name in metrics.counter_names() if name.startswith("aten::") and name not in READS)
        text = f"{self.compiled} graphs compiled, {self.executed} run"
        if fallen:
            text += f"; computed on the host, since the engine lacks them: {', '.join(fallen)}"
        return text


def _count(data: tuple[int, ...] | None) -> int:
    return 0 if data is None else int(data[0])
