"""Looking at where the time goes: torch's profiler on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["ProfileKwargs", "profile"]


@attrs.frozen
class ProfileKwargs(KwargsHandler):
    """How ``accelerator.profile()`` records.

    Attributes:
        activities: Names such as ``"cpu"``, of ``torch.profiler.ProfilerActivity``; None: what the device has.
        schedule_option: Arguments of ``torch.profiler.schedule``: ``wait``, ``warmup``, ``active``, ``repeat``,
            ``skip_first``. None records from beginning to end.
        on_trace_ready: Called with the profiler after each recorded period.
        record_shapes: Whether shapes of inputs are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether source lines are recorded.
        with_flops: Whether the work of matrix products and convolutions is estimated.
        with_modules: Whether modules are recorded.
        output_trace_dir: Directory for one ``profile_<rank>.json`` a rank, to be opened in a trace viewer.
    """

    section: ClassVar[str] = ""
    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self, activities: Sequence[Any] = ()) -> Any:
        """The profiler.

        Args:
            activities: What is recorded if this object names nothing; none: what torch finds.

        Raises:
            ValueError: A name is no activity of this torch.
        """
        import torch

        known = torch.profiler.ProfilerActivity.__members__
        unknown = [name for name in self.activities or () if name.upper() not in known]
        if unknown:
            raise ValueError(
                f"activities: {', '.join(unknown)} is nothing this torch can record; it knows "
                f"{', '.join(name.lower() for name in known)}"
            )
        named = [known[name.upper()] for name in self.activities or ()]
        return torch.profiler.profile(
            activities=named or list(activities) or None,
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextlib.contextmanager
def profile(run: Run, handler: ProfileKwargs) -> Iterator[Any]:
    """Record what happens in the context; write a rank's trace where the handler says."""
    with handler.build(run.hooks.profiler_activities(run=run)) as profiler:
        yield profiler
        run.hooks.synchronize(run=run)  # what the device has not done yet would be missing in the trace
    if handler.output_trace_dir is None:
        return
    folder = Path(handler.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"profile_{run.world.rank}.json"))
    run.hooks.barrier(run=run, group=None)  # all traces are there when anybody goes on
