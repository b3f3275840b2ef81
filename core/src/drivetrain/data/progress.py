"""Where a loader stands: its epoch, and how many of its batches the user has been given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

__all__ = ["Progress"]

_KEYS = ("epoch", "position", "seed", "round_size", "unit")


@attrs.define(eq=False)
class Progress:
    """The state of a loader, shared by the copies that ``skip_first_batches`` makes of it.

    An epoch ends when all its batches were given. One that the user broke off counts too, else a loop that stops each
    epoch after some steps would train on the same few batches for ever. The exception is one that gave a single batch:
    that was a look at the data, perhaps on one rank only, and must not move the order.
    """

    seed: int
    """What the order is derived from, together with the epoch."""
    epoch: int = 0
    position: int = 0
    """Batches of the epoch the user has been given."""
    at_end: bool = False
    """Whether the last of them is the epoch's last."""
    pending: int = 0
    """Batches the next pass leaves out, since a run before this one had them."""
    broken_off: bool = False

    def begin(self, skip: int | None) -> tuple[int, int]:
        """A pass begins.

        Args:
            skip: Batches to leave out; None for as many as are pending.

        Returns:
            Its epoch, and how many batches it leaves out.
        """
        if self.broken_off:
            self.set_epoch(self.epoch + 1)
        start = self.pending if skip is None else skip
        self.position, self.at_end = start, False
        return self.epoch, start

    def end(self, epoch: int, given: int, complete: bool) -> bool:
        """A pass ended, by itself or because the user left it.

        Args:
            epoch: As ``begin`` returned it.
            given: Batches it gave.
            complete: Whether they include the epoch's last one.

        Returns:
            Whether the pass counts, so that batches it left out are not left out again.
        """
        if complete:
            if self.epoch <= epoch:
                self.set_epoch(epoch + 1)
            return True
        if self.epoch != epoch:  # given up long ago: another pass or the user moved on
            return True
        if given > 1:
            self.broken_off, self.pending = True, 0
            return True
        self.position, self.at_end = self.pending, False
        return False

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The epoch a resumed loader is in the middle of keeps its place."""
        if epoch != self.epoch or self.broken_off:
            self.epoch, self.position, self.pending = epoch, 0, 0
            self.at_end = self.broken_off = False

    def move(self, position: int) -> None:
        """Let the next pass start at a batch of the current epoch."""
        self.position = self.pending = position
        self.at_end = self.broken_off = False

    def state_dict(self, round_size: int, unit: str) -> dict[str, Any]:
        """The state as plain values.

        Args:
            round_size: Units that all ranks together are given with each batch.
            unit: ``"samples"``, or ``"batches"`` of the unprepared loader where batches vary in size.
        """
        epoch, position = (self.epoch + 1, 0) if self.at_end else (self.epoch, self.position)
        return {"epoch": epoch, "position": position, "seed": self.seed, "round_size": round_size, "unit": unit}

    def load_state_dict(
        self, state: Mapping[str, Any], round_size: int, unit: str, count: Callable[[int, int], int | None]
    ) -> None:
        """Go where a loader was, perhaps one of another number of ranks.

        Args:
            state: What ``state_dict`` returned.
            round_size: As in ``state_dict``, for this loader.
            unit: As in ``state_dict``, for this loader.
            count: Batches of this loader for a seed and an epoch; None if not known.

        Raises:
            ValueError: The state is incomplete, its position lies inside a round of this loader, or beyond its end.
        """
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise ValueError(f"this is not the state of a loader: it lacks {', '.join(missing)}")
        done = state["position"] * state["round_size"]
        if done and state["unit"] != unit:
            raise ValueError(
                f"the position was saved in {state['unit']}, but this loader counts {unit}: it batches in another way"
            )
        if done % round_size:
            raise ValueError(
                f"the state was saved after {done} {unit} of the epoch ({state['position']} rounds of "
                f"{state['round_size']}), which is no multiple of the {round_size} that a round has now; resume with "
                f"a number of ranks and a batch size whose product divides {done}, or save at the end of an epoch"
            )
        position, seed, epoch = done // round_size, state["seed"], state["epoch"]
        total = count(seed, epoch)
        if total is not None and position > total:
            raise ValueError(
                f"the state was saved after {done} {unit} of an epoch, but an epoch of this loader has {total} batches "
                f"of {round_size} over all ranks: it reads other data"
            )
        self.seed, self.epoch = seed, epoch
        self.move(position)
        if position and position == total:
            self.set_epoch(epoch + 1)
