"""One model on every rank: wrapping it, getting it back, and when its gradients are averaged."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import DrivetrainError, add_note
from drivetrain.nested import leaves
from drivetrain.world import Run
from drivetrain_backends.replicas import check_same_model, copy_from_first_rank
from drivetrain_ddp.comm_hooks import register
from drivetrain_ddp.config import DdpConfig

__all__ = ["Replica", "inner", "joined", "replicate", "synchronized", "unsynchronized"]

_SYNCHRONIZES = "require_backward_grad_sync"
"""The attribute of DistributedDataParallel that says whether a forward prepares the next backward to average."""


class Replica(DistributedDataParallel):
    """DistributedDataParallel that a loop written for the plain model can't tell from it.

    Public attributes of the user's module are found on it. A method of the module may be called too, as long as nothing
    that it returns is to be differentiated: what is computed outside ``forward`` is not averaged over the ranks.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # Attributes are freed in the order in which they were set. If the reducer is freed after the process group's
        # Python object, it takes the group itself along while holding the interpreter's lock, and waits for threads
        # that may be waiting for that lock: a process that ends its run before it frees its models would hang.
        self.process_group = self.__dict__.pop("process_group")
        self.never_ran = True
        """Whether forward has not been called yet."""

    @property
    def module(self) -> nn.Module:
        """The user's module. A property, since every forward would else look for it by way of ``__getattr__``."""
        module: nn.Module = self._modules["module"]
        return module

    def refuse_gradients_of_others(self) -> None:
        """For a replica that never ran.

        Raises:
            DrivetrainError: There are gradients all the same.
        """
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            raise DrivetrainError(
                f"the optimizer stepped on gradients of {type(self.module).__name__} that were never averaged over the "
                f"ranks: its forward was not called on what prepare returned. Train on that: "
                f"model, ... = accelerator.prepare(model, ...)"
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. Gradients of what it returns are averaged over all ranks."""
        if self.never_ran:  # asked first: setting a module's attribute is slow
            self.never_ran = False
        try:
            return DistributedDataParallel.forward(self, *inputs, **kwargs)  # cheaper than super() on every step
        except RuntimeError as error:
            if "find_unused_parameters" in str(error):
                add_note(
                    error,
                    "In Drivetrain: `ddp: {find_unused_parameters: true}` in the YAML, "
                    "`--set ddp.find_unused_parameters=true`, or DistributedDataParallelKwargs in code",
                )
            raise

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "module":  # private names are between torch and the wrapper
                raise
        found = getattr(self.module, name)
        return _outside_forward(found, name) if inspect.ismethod(found) else found


def _outside_forward(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves(result)
        ):
            raise DrivetrainError(
                f"model.{name}(...) computed something to be differentiated outside the model's forward, where "
                f"gradients are not averaged over the ranks. Compute it in forward (which may call {name}) and call "
                f"model(...), or use torch.no_grad() if no gradients are wanted, or "
                f"accelerator.unwrap_model(model).{name}(...) if this rank is meant to work alone"
            )
        return result

    return call


def replicate(run: Run, model: nn.Module, config: DdpConfig) -> nn.Module:
    """Wrap a model so that the gradients of its forward are averaged over all ranks.

    Args:
        run: The run.
        model: On its device, equal in shape on all ranks. Its values become those of rank 0.
        config: The section ``ddp``.

    Returns:
        A :class:`Replica`; the model itself if there is nothing to average.

    Raises:
        CollectiveMismatchError: The model differs between ranks; raised on all of them.
        ConfigError: The communication hook can't work in this run.
        DrivetrainError: The model is wrapped already, or not initialised.
    """
    if run.world.collectives is None:
        return model
    if isinstance(model, DistributedDataParallel):
        raise DrivetrainError("this model is a DistributedDataParallel already; give prepare the module inside it")
    check_same_model(run, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        copy_from_first_rank(run, model)
        return model
    options: dict[str, Any] = {
        "bucket_cap_mb": config.bucket_cap_mb,
        "find_unused_parameters": config.find_unused_parameters,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "static_graph": config.static_graph,
    }
    if not config.broadcast_buffers:
        options["broadcast_buffers"] = False  # torch 2.13 deprecates saying True, which is the default
    with warnings.catch_warnings():
        # Its successor in torch 2.13 would broadcast them at the start all the same.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        # No device_ids: batches are on the device already, and DDP would take every input apart to look.
        replica = Replica(model, **options)
    register(run, replica, config)
    return replica


def inner(model: nn.Module) -> nn.Module:
    """The user's module in what :func:`replicate` returned."""
    return model.module if isinstance(model, Replica) else model


def _replicas(models: Sequence[nn.Module]) -> list[Replica]:
    return [model for model in models if isinstance(model, Replica)]


def unsynchronized(models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    """Context in which gradients add up on each rank by themselves. Holds for forward and backward."""
    if len(models) == 1 and isinstance(models[0], Replica):  # a short cut, taken on every step
        return _Unsynchronized(models[0])
    return _all_unsynchronized(_replicas(models))


@contextlib.contextmanager
def _all_unsynchronized(replicas: Sequence[Replica]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(_Unsynchronized(replica))
        yield


class _Unsynchronized:
    """What ``no_sync`` does, for a tenth of its time on every step: that is a generator, and sets a module's attribute
    in the way that first asks whether it is a parameter."""

    def __init__(self, replica: Replica) -> None:
        self._fields = replica.__dict__

    def __enter__(self) -> None:
        self._before = self._fields[_SYNCHRONIZES]
        self._fields[_SYNCHRONIZES] = False

    def __exit__(self, *error: object) -> None:
        self._fields[_SYNCHRONIZES] = self._before


@contextlib.contextmanager
def synchronized(model: nn.Module) -> Iterator[None]:
    """Context in which a backward averages the gradients of forwards that ran while they were kept apart.

    Raises:
        DrivetrainError: ``find_unused_parameters`` is on; which those are is only looked for in a forward.
    """
    if not isinstance(model, Replica):
        yield
        return
    if model.find_unused_parameters:
        raise DrivetrainError(
            "find_unused_parameters can't be combined with deciding in backward to average: which parameters took no "
            "part is found in a forward outside of no_sync"
        )
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def joined(models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    """Context in which ranks may have different numbers of batches."""
    replicas = _replicas(models)
    return Join(replicas) if replicas else contextlib.nullcontext()
