"""The gate of gradient accumulation: which micro-batch ends a group, and what its losses are divided by.

A group is N consecutive micro-batches whose gradients are added up before the optimizer steps. Who counts them:

* Inside ``with accelerator.accumulate(...)`` the blocks count, those that name different models apart from each other.
* Without a block the batches of the prepared loader that is being iterated count.
* With neither, every backward is a group of its own.

A loader's last batch ends its group early. Where the loader's length is known, so is the size of that short group when
it starts, and its losses are divided by that; where it is not (a stream), they are divided by N and the gradients are
rescaled by N/k before they are clipped or applied.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import attrs
from torch import nn

from drivetrain.errors import DrivetrainError
from drivetrain.validators import at_least, one_of

__all__ = ["Accumulation", "Block", "Frame", "GradientAccumulationPlugin"]


@attrs.frozen
class GradientAccumulationPlugin:
    """How micro-batches form groups.

    Attributes:
        num_steps: Micro-batches in a group; None: as configured outside the code.
        adjust_scheduler: Accepted for scripts that pass it; schedulers always count updates.
        sync_with_dataloader: Whether a loader's last batch ends the group. If not, groups run on across epochs.
        sync_each_batch: Reduce gradients over ranks after every micro-batch: more communication, less memory under
            backends that keep unreduced gradients whole.
        short_group: What happens to a group of k < N micro-batches at a loader's end. ``"mean"``: its gradient is the
            mean over the k, as in every other group. ``"fixed"``: it is still divided by N, as people need who
            multiply the loss by N themselves (the usual recipe for weighting tokens).
    """

    num_steps: int | None = attrs.field(default=None, validator=at_least(1, optional=True))
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    short_group: Literal["mean", "fixed"] = attrs.field(default="mean", validator=one_of("mean", "fixed"), kw_only=True)


def _key(models: Sequence[nn.Module]) -> tuple[int, ...]:
    """What tells the groups of blocks apart; in which order a block names its models does not."""
    return tuple(sorted(map(id, models)))


@attrs.define(eq=False)
class _Group:
    begun: int = 0
    """Micro-batches of the group so far."""
    size: int = 1
    """What the losses of this group are divided by."""


@attrs.define(eq=False)
class Frame:
    """One iteration of a prepared loader; the one at the bottom of the stack stands for code outside any."""

    loader: Any = None
    left: int | None = None
    """Batches to come, the current one included; None if not known."""
    sync: bool = True
    """Whether optimizers step on the current micro-batch."""
    size: int = 1
    rescale: float = 1.0
    """What gradients must still be multiplied by: their group turned out shorter than its losses were divided by."""
    batch: int = 0
    """Number of the current micro-batch, unique in the process; 0 where none has begun."""
    counts_for: Any = None
    """The loader whose group the batches of a plain loop belong to."""
    group: _Group | None = None
    """That group, once it was looked up."""


class _Entered(NamedTuple):
    """A block that was entered: its models, the backend's context if it opened one, and its micro-batch."""

    models: Sequence[nn.Module]
    context: contextlib.AbstractContextManager[Any] | None
    batch: int


class Block(contextlib.ContextDecorator):
    """One micro-batch of a group. A class, since a generator would cost three times as much on every step.

    Args:
        gate: Whom it tells.
        models: Models trained in it; the blocks of a group name the same ones.
    """

    def __init__(self, gate: Accumulation, models: Sequence[nn.Module]) -> None:
        self._gate = gate
        self._models = models

    def __enter__(self) -> None:
        gate, context = self._gate, None
        if gate.blocks and gate.blocks[-1].batch == gate.frame.batch:
            gate.check_inner(self._models)  # it belongs to the outer one's micro-batch, which is counted already
        else:
            context = gate.begin(self._models)
        if context is not None:
            context.__enter__()
        gate.blocks.append(_Entered(self._models, context, gate.frame.batch))
        gate.named = self._models

    def __exit__(self, *error: Any) -> bool | None:
        blocks = self._gate.blocks
        context = blocks.pop().context
        self._gate.named = blocks[-1].models if blocks else ()
        return None if context is None else context.__exit__(*error)


class Accumulation:
    """The gate of one Accelerator. Loaders report to it; optimizers and ``backward`` ask it.

    Args:
        steps: Micro-batches in a group.
        plugin: How groups are formed.
        context: Opens the backend's context of a micro-batch; called with whether it is the last of its group.
    """

    def __init__(
        self,
        steps: int,
        plugin: GradientAccumulationPlugin,
        context: Callable[[bool], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.steps = steps
        self.plugin = plugin
        self._context = context
        self._open: contextlib.AbstractContextManager[Any] | None = None
        self._bottom = Frame()
        self._frames: list[Frame] = [self._bottom]
        self.frame = self._bottom
        """The iteration that counts now: of the loader that yielded last."""
        self._groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
        self._blocks: dict[tuple[int, ...], _Group] = {}
        self._batches = 0
        self.blocks: list[_Entered] = []
        """Blocks that are entered now, the innermost last."""
        self.named: Sequence[nn.Module] = ()
        """Models the current block named; empty: all."""

    @property
    def idle(self) -> bool:
        """Whether no prepared loader is being iterated."""
        return self.frame is self._bottom

    @property
    def short(self) -> bool:
        """Whether the loader's end may have made the current group smaller."""
        frame = self.frame
        return (frame.size != self.steps or frame.rescale != 1.0) and frame is not self._bottom

    @property
    def loaders(self) -> list[Any]:
        """Loaders being iterated, the innermost last."""
        return [frame.loader for frame in self._frames[1:]]

    # ------------------------------------------------------------------------------------------- reported by loaders

    def enter(self, loader: Any) -> Frame:
        """A loader's iteration starts."""
        # A copy that skips batches goes on with the group of the loader it is a copy of.
        frame = Frame(loader, counts_for=getattr(loader, "origin", loader))
        self._frames.append(frame)
        self.frame = frame
        return frame

    def advance(self, frame: Frame, left: int | None) -> None:
        """A loader is about to hand out a batch; ``left`` counts it and those after it, None if unknown."""
        frame.left = left
        self._batches += 1
        frame.batch = self._batches
        if self.frame is not frame:  # loaders iterated side by side: the one that yielded last counts
            self._frames.remove(frame)
            self._frames.append(frame)
            self.frame = frame
        if self.steps == 1:
            frame.sync, frame.size, frame.rescale = True, 1, 1.0
            return
        group = frame.group
        if group is None:
            group = frame.group = self._groups.setdefault(frame.counts_for, _Group())
        self._begin(frame, group)
        self._switch(frame)

    def leave(self, frame: Frame) -> None:
        """A loader's iteration ended, or was broken off."""
        if frame not in self._frames:
            return
        self._frames.remove(frame)
        self.frame = self._frames[-1]
        self._switch(self.frame)

    # ------------------------------------------------------------------------------------------------------- blocks

    def begin(self, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        """A block is entered. Returns the backend's context for it; None if it needs none, or is in it already."""
        frame = self.frame
        if frame is self._bottom:  # inside a loader its batches have numbers already, which several blocks share
            self._batches += 1
            frame.batch = self._batches
        if self.steps == 1:
            frame.sync, frame.size, frame.rescale = True, 1, 1.0
            return None
        key = _key(models)
        group = self._blocks.get(key)
        if group is None:
            group = self._blocks[key] = _Group()
        self._begin(frame, group)
        last = frame.sync or self.plugin.sync_each_batch
        if self._open is not None and not last:
            return None  # the loader opened the same one, for loops without blocks
        self._close()
        return self._context(last)

    def check_inner(self, models: Sequence[nn.Module]) -> None:
        """A block is entered inside of another, in the same micro-batch.

        Raises:
            DrivetrainError: It names other models, for which this micro-batch may not be the last of its group.
        """
        outer = self.blocks[-1].models
        if self.steps > 1 and _key(models) != _key(outer):
            names = [", ".join(type(model).__name__ for model in each) or "all models" for each in (models, outer)]
            raise DrivetrainError(
                f"accumulate for {names[0]} was entered inside of accumulate for {names[1]}: their groups of "
                f"micro-batches are counted apart, so one block can't be inside of the other. Name all of them in one "
                f"block, accelerator.accumulate(a, b), or let one block follow the other"
            )

    # ----------------------------------------------------------------------------------------------------- counting

    def _begin(self, frame: Frame, group: _Group) -> None:
        left = frame.left if self.plugin.sync_with_dataloader else None
        mean = self.plugin.short_group == "mean"
        if group.begun == 0:
            group.size = self.steps if left is None or not mean else min(self.steps, left)
        group.begun += 1
        frame.sync = group.begun >= self.steps or left == 1
        frame.size = group.size
        frame.rescale = 1.0
        if frame.sync:
            if mean:
                frame.rescale = group.size / group.begun
            group.begun = 0

    def _switch(self, frame: Frame) -> None:
        """Open or close the backend's context for the frame that counts now. It stays open from batch to batch."""
        if frame.sync or self.steps == 1 or self.plugin.sync_each_batch or frame is self._bottom:
            self._close()
        elif self._open is None:
            self._open = self._context(False)
            self._open.__enter__()

    def set_steps(self, steps: int) -> None:
        """Change how many micro-batches make a group, from the next one on."""
        self.steps = steps
        self._switch(self.frame)

    def renew(self) -> None:
        """Open the backend's context anew, if it is open: there are other models than when it was opened."""
        if self._open is not None:
            self._close()
            self._switch(self.frame)

    def _close(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(None, None, None)

    # -------------------------------------------------------------------------------------------------------- state

    @property
    def batches(self) -> int:
        """Micro-batches begun since the run started, those of the runs it continues included."""
        return self._batches

    @property
    def unfinished(self) -> int:
        """Micro-batches begun in the longest group that has not ended."""
        groups = [*self._blocks.values(), *self._groups.values()]
        return max((group.begun for group in groups), default=0)

    def state_dict(self, models: Sequence[nn.Module], loaders: Sequence[Any]) -> dict[str, Any]:
        """Where every unfinished group stands, as plain values.

        Args:
            models: Prepared ones; groups of blocks are told apart by positions in it.
            loaders: Prepared ones; groups of plain loops are told apart by positions in it.
        """
        models_at = {id(model): position for position, model in enumerate(models)}
        loaders_at = {id(loader): position for position, loader in enumerate(loaders)}
        blocks = [
            {"models": [models_at.get(key) for key in keys], "begun": group.begun, "size": group.size}
            for keys, group in self._blocks.items()
            if group.begun
        ]
        loops = [
            {"loader": loaders_at.get(id(loader)), "begun": group.begun, "size": group.size}
            for loader, group in self._groups.items()
            if group.begun
        ]
        return {"batches": self._batches, "blocks": blocks, "loaders": loops}

    def load_state_dict(self, state: Mapping[str, Any], models: Sequence[nn.Module], loaders: Sequence[Any]) -> None:
        """Go on where ``state_dict`` was called, with models and loaders prepared in the same order.

        Groups of models or loaders that were not prepared there, or are not here, start anew.
        """
        self.forget_groups()
        self._batches = state["batches"]
        for saved in state["blocks"]:
            if all(position in range(len(models)) for position in saved["models"]):
                key = _key([models[position] for position in saved["models"]])
                self._blocks[key] = _Group(saved["begun"], saved["size"])
        for saved in state["loaders"]:
            if saved["loader"] in range(len(loaders)):
                self._groups[loaders[saved["loader"]]] = _Group(saved["begun"], saved["size"])

    def forget_groups(self) -> None:
        """Start every group anew."""
        self._blocks.clear()
        self._groups.clear()
        for frame in self._frames:
            frame.group = None
