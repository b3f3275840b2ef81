"""What an Accelerator passes on from the process's state: who am I, and what to do about it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import mismatch
from drivetrain.elsewhere import KnownElsewhere

if TYPE_CHECKING:
    from drivetrain.distributed_type import DistributedType
    from drivetrain.state import AcceleratorState
    from drivetrain.world import Run

__all__ = ["ProcessMixin"]


class ProcessMixin(KnownElsewhere):
    """Process properties and helpers; see :class:`drivetrain.PartialState` for what each does."""

    run: Run
    state: AcceleratorState

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.run.world.device

    @property
    def distributed_type(self) -> DistributedType:
        """How processes work together, as the backend calls it."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Processes of the run, over all machines."""
        return self.run.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process among all."""
        return self.run.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.run.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.run.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.run.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.run.world.size > 1

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one accelerator. Processes on CPUs do not count as such."""
        return self.run.world.data_size > 1 and self.run.world.device.type != "cpu"

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes files that are the same for all."""
        return self.run.world.rank == 0

    @property
    def data_parallel_rank(self) -> int:
        """First data shard of this process."""
        return self.run.world.data_rank

    @property
    def mixed_precision(self) -> str:
        """Name of the precision the run computes in."""
        return self.run.names["precision"]

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine."""
        self.state.print(*args, **kwargs)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """Context that gives this process's part of ``inputs``."""
        return self.state.split_between_processes(inputs, apply_padding)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context whose body the main process runs before all others do."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context whose body the first process of each machine runs before the others there do."""
        return self.state.local_main_process_first()

    def on_main_process(self, function: Any) -> Any:
        """Decorator: run the function on the main process only."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Any) -> Any:
        """Decorator: run the function on the first process of each machine only."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Any) -> Any:
        """Decorator: run the function on the last process only."""
        return self.state.on_last_process(function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on one process only."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on one process of each machine only."""
        return self.state.on_local_process(function, local_process_index)

    def set_trigger(self) -> None:
        """Raise a flag that any process can raise, and all see in ``check_trigger``: to stop early, say."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last time. Lowers it. Every process must call this."""
        mismatch.check(self.run, "check_trigger", None)
        mine = torch.tensor([self._triggered], dtype=torch.int64, device=self.run.world.device)
        raised = self.run.hooks.all_reduce(run=self.run, tensor=mine, op="max", group=None)
        self._triggered = False
        return bool(raised.item())

    _triggered = False
