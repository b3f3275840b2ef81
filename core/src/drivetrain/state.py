"""Process-wide views of the run: who am I, what is it set to, where is it.

There is one run in a process, since there is one world. It is made by the first object that needs it and shared by all
others. What a state asks for is who it is, so the first Accelerator may still say how to compute and distribute; later,
asking for other settings raises instead of building a second world.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

from drivetrain import collectives
from drivetrain.conflicts import added, check_right, check_same, differing, of_the_world
from drivetrain.distributed_type import DistributedType
from drivetrain.elsewhere import KnownElsewhere
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.config import Resolved
    from drivetrain.runtime import Runtime
    from drivetrain.world import Run

__all__ = ["AcceleratorState", "GradientState", "PartialState", "current", "ensure", "living_accelerators", "reset"]

_F = TypeVar("_F", bound=Callable[..., Any])
_runtime: Runtime | None = None
_ended: Run | None = None
"""The run that was taken down last: states still know who they were."""
_asked: dict[str, Any] = {}
"""What the run was asked for in code so far."""
_settled = False
"""Whether an Accelerator has been made, which may have prepared objects."""
_accelerators: list[weakref.ref[Accelerator]] = []

# Settings an Accelerator keeps for itself, so that a second one may have others.
_OWN = frozenset({"gradient_accumulation_steps"})


def current() -> Runtime | None:
    """The run of this process; None if there is none yet."""
    return _runtime


def ensure(code: Mapping[str, Any] | None = None, config_file: Any = None) -> Runtime:
    """The run of this process, brought up if there is none yet.

    Args:
        code: Settings given in code, by key; ``section.key`` for those of plugins.
        config_file: As for ``drivetrain launch --config_file``.

    Raises:
        ConfigError: A setting is wrong; one line for each.
        PluginNotFoundError: A plugin that is named is not there, also where a run with another one is there already.
        StateConflictError: The process runs already, with another value for one of ``code``, or without that file.
    """
    global _runtime
    asked = dict(code or {})
    code = {key: value for key, value in asked.items() if key not in _OWN}
    check_right({key: value for key, value in asked.items() if key in _OWN})
    if _runtime is None:
        from drivetrain.config import resolve

        _runtime = _start(resolve(config_file=config_file, code=code))
        atexit.register(_close_at_exit)
    else:
        fixed = {key: value for key, value in code.items() if _settled or key in _asked or of_the_world(key)}
        check_same(_runtime, fixed, config_file)
        if differing(_runtime, code):
            _runtime = _start(added(_runtime.resolved, code), former=_runtime)
    _asked.update(code)
    return _runtime


def _start(resolved: Resolved, former: Runtime | None = None) -> Runtime:
    from drivetrain.checking import telling_all
    from drivetrain.logging import configure
    from drivetrain.runtime import start

    configure(resolved.run.log_level)
    with telling_all(resolved):
        return start(resolved, former=former)


def reset(error: BaseException | None = None) -> None:
    """Take the run down, so that the next Accelerator starts a new one. For tests and notebooks."""
    global _runtime, _ended, _settled
    runtime, _runtime, _settled = _runtime, None, False
    _asked.clear()
    _accelerators.clear()
    atexit.unregister(_close_at_exit)
    if runtime is not None:
        _ended = _facts(runtime.run)
        runtime.close(error)


def _facts(run: Run) -> Run:
    """A run that keeps nothing alive: it only says where this process was and how it computed."""
    world = attrs.evolve(run.world, data_group=None, mesh=None)
    return attrs.evolve(run, world=world, hooks=None)  # type: ignore[arg-type]


def _close_at_exit() -> None:
    # Not a word with the other ranks: they may be gone, and this process may be ending because of it.
    reset(SystemExit())


def adopt(accelerator: Accelerator) -> None:
    """Make an Accelerator the one that ``GradientState`` views."""
    global _settled
    _settled = True
    _accelerators[:] = [ref for ref in _accelerators if ref() not in (None, accelerator)]
    _accelerators.append(weakref.ref(accelerator))


def living_accelerators() -> list[Accelerator]:
    """Accelerators of this process that are still in use, the one made last first."""
    return [found for reference in reversed(_accelerators) if (found := reference()) is not None]


class PartialState(KnownElsewhere):
    """Who this process is: rank, device and number of processes, and what can be done with just that.

    All instances view the same run; the first one brings it up. What they say of this process stays true after the run
    was taken down.

    Args:
        cpu: Run on the CPU even where there is an accelerator.
        settings: Further settings by key, as in the YAML. The first Accelerator may add to them.
    """

    def __init__(self, cpu: bool = False, **settings: Any) -> None:
        if cpu:
            settings["device"] = "cpu"
        ensure(settings)

    @property
    def _run(self) -> Run:
        """The run, to do something in it."""
        if _runtime is None:
            raise DrivetrainError(
                "the run was taken down (end_training and destroy_process_group do), so processes can't wait for each "
                "other any more; do it before, or make a new state or Accelerator"
            )
        return _runtime.run

    @property
    def _seen(self) -> Run:
        """The run, to look at: the last one, where it was taken down."""
        return self._run if _runtime is not None or _ended is None else _ended

    # ------------------------------------------------------------------------------------------------------ facts

    @property
    def initialized(self) -> bool:
        """Whether there is a run."""
        return _runtime is not None

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._seen.world.device

    @property
    def distributed_type(self) -> DistributedType:
        """How processes work together, such as ``"NO"`` or ``"MULTI_CPU"``; plugins have names of their own."""
        return DistributedType(self._seen.capabilities.distributed_type)

    @property
    def backend(self) -> str | None:
        """Name of the communication library, such as ``"gloo"``; None without one."""
        return self._seen.world.collectives

    @property
    def num_processes(self) -> int:
        """Processes of the run, over all machines."""
        return self._seen.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process among all."""
        return self._seen.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self._seen.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._seen.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._seen.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._seen.world.rank == self._seen.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._seen.world.size > 1

    # ------------------------------------------------------------------------------------------------- what to do

    def wait_for_everyone(self) -> None:
        """Return when every process has called this.

        Raises:
            CollectiveMismatchError: Another process is in another collective.
        """
        collectives.wait_for_everyone(self._run)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextlib.contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
            yield
            return
        try:
            yield
        finally:
            # Also after an exception: it ends this process, and the others must not wait for it for ever.
            self.wait_for_everyone()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context whose body the main process runs before all others do."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context whose body the first process of each machine runs before the others of that machine do."""
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, tuple, tensor, array or dict of those; nothing is sent.

        The first ``n % num_processes`` processes get one more. ``inputs`` is left as it is.

        Args:
            inputs: The same on every process.
            apply_padding: Repeat the last element where a part is shorter than the longest one.
        """
        from drivetrain.data.split import split

        yield split(inputs, self.process_index, self.num_processes, apply_padding)

    def on_main_process(self, function: _F) -> _F:
        """Decorator: run the function on the main process only; elsewhere it returns None."""
        return _only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: _F) -> _F:
        """Decorator: run the function on the first process of each machine only."""
        return _only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: _F) -> _F:
        """Decorator: run the function on the last process only."""
        return _only(function, lambda: self.is_last_process)

    def on_process(self, function: _F | None = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on one process only; where there is no such process, on none.

        Raises:
            TypeError: No process is named.
        """
        if process_index is None:
            raise TypeError("on_process needs to know which process: on_process(process_index=0)")
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: _F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on one process of each machine only; where there is no such process, on none.

        Raises:
            TypeError: No process is named.
        """
        if local_process_index is None:
            raise TypeError("on_local_process needs to know which process: on_local_process(local_process_index=0)")
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only(function, lambda: self.local_process_index == local_process_index)

    def destroy_process_group(self) -> None:
        """Take the run down. Every process must call it."""
        reset()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(distributed_type={self.distributed_type}, num_processes={self.num_processes}, "
            f"process_index={self.process_index}, device={self.device})"
        )


def _only(function: _F, condition: Callable[[], bool]) -> _F:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return called  # type: ignore[return-value]


class AcceleratorState(PartialState):
    """``PartialState``, and what the run computes in."""

    @property
    def mixed_precision(self) -> str:
        """Name of the precision the run computes in."""
        return self._seen.names["precision"]

    @property
    def config(self) -> Any:
        """The resolved configuration."""
        return self._seen.config


class GradientState(KnownElsewhere):
    """Where gradient accumulation and the loaders stand.

    Of the Accelerator whose loader is being iterated; of the one created last where there is none.
    """

    @property
    def _accelerator(self) -> Accelerator:
        living = living_accelerators()
        if not living:
            raise DrivetrainError("there is no Accelerator whose gradients could be looked at; create one first")
        return next((one for one in living if not one.gate.idle), living[0])

    @property
    def initialized(self) -> bool:
        """Whether there is an Accelerator to look at."""
        return bool(living_accelerators())

    @property
    def sync_gradients(self) -> bool:
        """Whether optimizers step on the current micro-batch."""
        return self._accelerator.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches in a group."""
        return self._accelerator.gradient_accumulation_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch ends the group."""
        return self._accelerator.gate.plugin.sync_with_dataloader

    @property
    def adjust_scheduler(self) -> bool:
        """As given; schedulers always count updates."""
        return self._accelerator.gate.plugin.adjust_scheduler

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._accelerator.gate.loaders)

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that yielded last; None outside any."""
        return self._accelerator.gate.frame.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """Prepared loaders being iterated, the innermost last; None stands first for the code around them."""
        return [None, *self._accelerator.gate.loaders]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader's last batch is in the user's hands."""
        return self._accelerator.gate.frame.left == 1

    @property
    def remainder(self) -> int:
        """Real samples of the active loader's last round; -1 if it is not known or there is no such loader."""
        return getattr(self.active_dataloader, "remainder", -1)

    def __repr__(self) -> str:
        return f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps})"
