"""Errors that all ranks share: what fails on one rank is raised on every rank, so that none waits for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["agreed"]


@contextlib.contextmanager
def agreed(run: Run, doing: str) -> Iterator[None]:
    """Context whose body fails on all ranks or on none. Every rank enters it.

    The body must not call a collective after anything in it that can fail on one rank alone.

    Args:
        run: The run.
        doing: What the body does, for the message.

    Raises:
        CheckpointError: The body raised on some rank; the same text on all ranks, each with its own cause.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    mine = None if failure is None else _describe(failure)
    texts = run.hooks.all_gather_object(run=run, value=mine, group=None)
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if not failed:
        return
    if isinstance(failure, CheckpointError) and set(texts) == {mine}:
        raise failure  # all ranks agreed on it before, or found the same by themselves
    first = next(iter(failed))
    others = [str(rank) for rank in failed if rank != first]
    also = f" (and on rank {', '.join(others)})" if others else ""
    where = f" on rank {first}{also}" if run.world.size > 1 else ""
    raise CheckpointError(f"{doing} failed{where}: {failed[first]}") from failure


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
