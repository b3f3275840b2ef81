"""THE contract, API 1: every hook a plugin may implement, in the order in which a run meets them.

Every hook has a default in core (:mod:`drivetrain.defaults`), so a plugin implements only what differs, and takes only
the arguments it needs, in any number. Two kinds of hooks:

* *one answer*: exactly one implementation is used, that of the first role named in ``roles`` whose plugin has one, else
  core's default. It is never followed by another, whatever it returns.
* *all called*: every plugin that implements it is called, backend first, then precision, then device. The defaults are
  called last.

Hooks marked *hot* are resolved once per run and then called positionally, so that a bound hook costs what a method call
costs. A plugin's own state belongs on the plugin's instance, which lives exactly as long as the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs
import pluggy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from drivetrain.bundle import Bundle
    from drivetrain.config import RunConfig
    from drivetrain.launch import LaunchPlan
    from drivetrain.world import Run, Topology, World

__all__ = ["HookInfo", "HookSpecs", "hooks"]

_F = TypeVar("_F", bound=Callable[..., Any])
_hookspec = pluggy.HookspecMarker("drivetrain")


@attrs.frozen(kw_only=True)
class HookInfo:
    """What the contract says of one hook, beside its signature."""

    name: str
    roles: tuple[str, ...]
    """Roles that may implement it. For a hook with one answer: in order of precedence."""
    where: Literal["launcher", "worker"]
    when: Literal["once", "prepare", "hot", "call"]
    """once per run; at ``prepare``; hot (every micro-batch or step); whenever the user calls for it."""
    all_called: bool
    returns: bool
    """Whether None is no valid answer."""


_INFO: dict[str, HookInfo] = {}


def _hook(
    *roles: str,
    where: Literal["launcher", "worker"] = "worker",
    when: Literal["once", "prepare", "hot", "call"] = "call",
    all_called: bool = False,
    returns: bool = True,
) -> Callable[[_F], _F]:
    def mark(function: _F) -> _F:
        name = function.__name__
        _INFO[name] = HookInfo(
            name=name, roles=roles, where=where, when=when, all_called=all_called, returns=returns and not all_called
        )
        return _hookspec(firstresult=not all_called)(function)

    return mark


class HookSpecs:
    """The hooks. ``self`` aside, argument names are part of the contract."""

    # ------------------------------------------------------------------ the launcher's process (no device is touched)

    @_hook("backend", "device", where="launcher", when="once")
    def launch(self, plan: LaunchPlan) -> int:
        """Start all processes of this machine, wait for them, and return the exit code.

        Default: ``torch.distributed.run``'s elastic agent, or a plain child process for a single one. A backend whose
        runtime starts its own processes implements it.

        :param plan: The script, its arguments, the numbers of processes and the environment they get.
        """

    @_hook("backend", "device", "precision", where="launcher", when="once", all_called=True)
    def launch_environment(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Environment variables every worker needs before it starts, such as the visible-devices variable.

        Default: none. The same variable from two plugins with two values is an error; what the user already set wins.

        :param plan: As in ``launch``.
        """

    @_hook("backend", "device", where="launcher", when="once")
    def process_count(self, plan: LaunchPlan) -> int:
        """How many processes this machine gets when the user named no number.

        Default: one for each accelerator torch reports, one if there is none.

        :param plan: As in ``launch``, its ``processes`` not yet decided.
        """

    # ----------------------------------------------------------------------------------------------------- the world

    @_hook("backend", "device", when="once")
    def device(self, topology: Topology) -> torch.device:
        """The one device this process works on, with its index where the device type has indices.

        Makes it the current device, if its type has such a notion.

        Default: the accelerator torch reports as available, at the local rank; the CPU if there is none.

        :param topology: What the launcher decided.
        """

    @_hook("backend", "device", when="once", returns=False)
    def compute_dtypes(self, device: torch.device) -> Collection[str] | None:
        """Names of the dtypes below 32 bits that models can be computed in here; None where that is not known.

        A precision that computes in another one is refused before anything is allocated: torch's autocast would warn
        and go on in full precision.
        Default: what torch's device module says (``get_amp_supported_dtype``, ``is_bf16_supported``), else None.

        :param device: The answer of the hook ``device``.
        """

    @_hook("backend", "device", when="once")
    def collectives(self, device_type: str) -> str:
        """Name of the communication library for tensors of that device type, as ``init_process_group`` takes it.

        Default: ``torch.distributed.get_default_backend_for_device``. Asked only where a process group is needed.

        :param device_type: Torch device type, such as ``"cpu"``.
        """

    @_hook("backend", when="once")
    def init_world(self, config: RunConfig, topology: Topology, device: torch.device, collectives: str | None) -> World:
        """Bring up communication and say where this process stands.

        Go on in what is up already: it is the user's, or that of a run which this one takes the place of and which is
        shut down after it (a state was asked who this process is, before an Accelerator said how to compute).

        Default: a world of one process; an error for more, since core itself has no collectives.

        :param config: The resolved configuration.
        :param topology: What the launcher decided.
        :param device: The answer of the hook ``device``.
        :param collectives: The answer of the hook ``collectives``; None if no process group is needed.
        """

    @_hook("backend", "device", "precision", when="once", all_called=True)
    def shutdown(self, run: Run, error: BaseException | None) -> None:
        """Take down what ``init_world`` brought up. Must not wait for other ranks when there is an error.

        :param run: The run that ends.
        :param error: What ended it; None if it ended well.
        """

    # --------------------------------------------------------------------------- prepare: core owns the order and calls
    # these from top to bottom: convert, move, autocast on forward, compile, then either the joint hook or the single
    # ones. Between them core restores tied parameters and points optimizers at replaced ones; plugins never do.

    @_hook("backend", when="prepare")
    def init_context(self, run: Run) -> AbstractContextManager[Any]:
        """Context in which a model is built so that it never exists whole on one rank.

        Default: builds it as written.
        """

    @_hook("precision", when="prepare")
    def convert_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Replace modules by ones that compute in the precision's formats. Called before anything is moved or sharded.

        Parameter names must stay as they are. Default: the model as it is.

        :param model: As the user made it.
        """

    @_hook("backend", "device", when="prepare")
    def move_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Put the model on ``run.world.device``. It may replace parameters.

        Left out where the user asked for no placement, or the backend's capabilities say ``moves_model`` and the model
        is going to be distributed.
        Default: ``model.to(run.world.device)``.
        """

    @_hook("backend", "device", when="prepare", returns=False)
    def compile_model(self, run: Run, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Compile the model in place, so that no wrapper changes its parameter names.

        Called only when compilation was asked for. Default: ``model.compile(**options)``.

        :param options: Keyword arguments of ``torch.compile``.
        """

    @_hook("backend", when="prepare", returns=False)
    def prepare(
        self, run: Run, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[Sequence[nn.Module], Sequence[Optimizer]] | None:
        """Wrap models and optimizers together, for engines that own both.

        Returns both in the same order, or None to leave this call to ``wrap_model`` and ``wrap_optimizer``.
        Default: None.

        :param models: All models of this ``prepare`` call, converted and moved.
        :param optimizers: All optimizers of this call, their parameters those of the models.
        """

    @_hook("backend", when="prepare")
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Make the model train on several processes. It may replace parameters.

        Default: the model as it is.
        """

    @_hook("backend", when="prepare")
    def wrap_optimizer(self, run: Run, optimizer: Optimizer, models: Sequence[nn.Module]) -> Optimizer:
        """Make the optimizer fit the wrapped models.

        Default: the optimizer as it is.

        :param optimizer: Already pointed at the parameters of the wrapped models.
        :param models: The wrapped models it holds parameters of.
        """

    @_hook("backend", when="prepare")
    def wrap_scheduler(self, run: Run, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """Replace a learning-rate scheduler, for engines with their own. Core's counting wraps the answer.

        An answer whose attribute ``counts`` is ``"updates"`` moves by one for each update, whatever the data size.

        Default: the scheduler as it is.

        :param optimizers: The prepared optimizers whose updates move it.
        """

    @_hook("backend", when="prepare")
    def wrap_loader(self, run: Run, loader: Iterable[Any]) -> Iterable[Any]:
        """Replace core's sharded loader by one that feeds the device better, such as a prefetching one.

        Default: the loader as it is.

        :param loader: Core's loader: already sharded, places each batch by the hook ``place``.
        """

    @_hook("backend", "precision", "device", when="prepare", all_called=True)
    def after_prepare(self, run: Run, bundle: Bundle) -> None:
        """Last word on what ``prepare`` made, before it is handed to the user.

        :param bundle: Everything prepared in this call, and the names of every parameter in it.
        """

    @_hook("backend", "precision", "device", all_called=True)
    def release(self, run: Run, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Let go of what is kept for prepared objects, so that their memory is free once the user drops them.

        Called by ``accelerator.free_memory()``, on every rank, before core forgets them itself. Others may be prepared
        afterwards.

        :param models: All prepared ones, as ``wrap_model`` or ``prepare`` returned them.
        :param optimizers: All prepared ones, as ``wrap_optimizer`` or ``prepare`` returned them.
        """

    # --------------------------------------------------------------------------------------- hot: every micro-batch

    @_hook("backend", "device", when="hot")
    def place(self, run: Run, batch: Any, non_blocking: bool) -> Any:
        """Bring a batch from the host to where the model computes.

        Default: every tensor in it ``.to(run.world.device)``, structure and types kept.

        :param batch: Any nesting of tensors and other values, as the loader's collate function made it.
        :param non_blocking: Whether the copy may overlap with what follows.
        """

    @_hook("precision", "device", when="hot")
    def autocast(self, run: Run, model: nn.Module | None) -> AbstractContextManager[Any]:
        """A fresh context in which operations run in the compute dtype. Entered around the forward of each model.

        Where the backend is native in the policy's compute dtype, only a precision's own implementation is used, which
        leaves that dtype to the backend. Default: ``torch.autocast`` with the policy's compute dtype, nothing if it
        has none.

        :param model: The one whose forward it surrounds, for what depends on ``model.training``; None for
            ``accelerator.autocast()``, which surrounds no model.
        """

    @_hook("backend", when="hot")
    def accumulate(self, run: Run, models: Sequence[nn.Module], last: bool) -> AbstractContextManager[Any]:
        """Context of micro-batches of a group, in which communication may wait for the last.

        Entered once for several in a row, where nothing separates them: in a plain loop for those before the last,
        which then runs outside of it. Not called where groups are of one. Default: nothing.

        :param models: Prepared models: all of them, whatever the user named.
        :param last: Whether the optimizers step at its end, as they do where none is entered.
        """

    @_hook("backend", when="hot", returns=False)
    def backward(self, run: Run, loss: Tensor, models: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        """Compute gradients.

        Default: ``loss.backward(**options)``.

        :param loss: Already divided by the number of micro-batches in the group, and scaled.
        :param models: Those the loss went through, if the user named them, else all prepared ones.
        :param options: What the user gave ``accelerator.backward`` beside the loss, such as ``retain_graph``. An
            implementation that does not take it refuses the user who gives any.
        """

    @_hook("backend", when="hot", returns=False)
    def scale_gradients(self, run: Run, optimizer: Optimizer, factor: float) -> None:
        """Multiply the reduced gradients of an optimizer's parameters by a number.

        Called before clipping and stepping when a group turned out shorter than its losses were divided by.
        Default: in place on every ``.grad``.

        :param optimizer: The user's (or the backend's) own optimizer.
        """

    @_hook("backend", "device", when="hot")
    def clip_grad_norm(self, run: Run, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before that.

        The norm is the global one, over all ranks and shards, a plain 0-d tensor with the same value on every rank.
        Default: ``torch.nn.utils.clip_grad_norm_``.

        :param parameters: Of one or several prepared models, or a part of one. Gradients are already unscaled.
        :param norm_type: p of the p-norm; may be ``inf``.
        """

    @_hook("backend", "device", when="hot", returns=False)
    def clip_grad_value(self, run: Run, parameters: Sequence[nn.Parameter], clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``.

        Default: ``torch.nn.utils.clip_grad_value_``.
        """

    @_hook("backend", when="hot")
    def step(self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Update parameters. Called only at the end of a group.

        Returns whether it did: False when the engine itself skipped the update (an overflow, say); core trusts it and
        leaves the schedulers alone. Default: ``optimizer.step(closure)``, True.

        :param optimizer: The answer of ``wrap_optimizer``, never core's wrapper.
        """

    @_hook("backend", when="hot", returns=False)
    def zero_grad(self, run: Run, optimizer: Optimizer, set_to_none: bool) -> None:
        """Really clear the gradients, whether or not ``step`` ran. Not called while a group is being accumulated.

        Default: ``optimizer.zero_grad(set_to_none=set_to_none)``.
        """

    @_hook("backend", "precision", "device", when="hot", all_called=True)
    def after_step(self, run: Run, models: Sequence[nn.Module], applied: bool) -> None:
        """After an optimizer's turn at the end of a group: cut the graph, recompute scales.

        :param models: The prepared models that optimizer holds parameters of.
        :param applied: Whether parameters were updated.
        """

    @_hook("backend", when="call")
    def sync_in_backward(self, run: Run, model: nn.Module) -> AbstractContextManager[Any]:
        """Context whose next backward reduces gradients, though the model's forward ran where it would not have.

        Default: nothing for one process, an error for several.

        :param model: A prepared model, run inside of ``accumulate`` with ``last`` False.
        """

    @_hook("backend", when="call")
    def join(self, run: Run, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Context in which ranks may run out of batches at different times.

        Default: nothing for one process, an error for several.
        """

    # --------------------------------------------------------------------------------------------------- collectives
    # `group` is a process group of the backend's kind; None means all ranks. Defaults: what they mean for one process.

    @_hook("backend")
    def all_gather(self, run: Run, tensor: Tensor, group: Any) -> Tensor:
        """Tensors of all ranks, stacked along a new first dimension in rank order: ``(size, *tensor.shape)``.

        Default: the one tensor, stacked.

        :param tensor: Same shape and dtype on every rank (core has checked).
        """

    @_hook("backend")
    def all_reduce(self, run: Run, tensor: Tensor, op: Literal["sum", "mean", "max", "min"], group: Any) -> Tensor:
        """Elementwise reduction over all ranks, the same result on each. The argument is left as it is.

        Default: a copy.

        :param tensor: Same shape and dtype on every rank (core has checked). For ``mean`` a floating-point one.
        """

    @_hook("backend")
    def broadcast(self, run: Run, tensor: Tensor, source: int, group: Any) -> Tensor:
        """The source rank's tensor on every rank.

        Default: the tensor as it is.

        :param tensor: On the source rank the value, on the others a tensor of that shape and dtype.
        """

    @_hook("backend", returns=False)
    def broadcast_object(self, run: Run, value: Any, source: int, group: Any) -> Any:
        """The source rank's picklable object on every rank. Default: the object as it is."""

    @_hook("backend")
    def all_gather_object(self, run: Run, value: Any, group: Any) -> list[Any]:
        """Picklable objects of all ranks, in rank order. Default: a list of the one."""

    @_hook("backend", returns=False)
    def barrier(self, run: Run, group: Any) -> None:
        """Return when every rank has called it. Default: at once."""

    @_hook("backend", "device", returns=False)
    def reduce_ops(self, run: Run) -> Collection[str] | None:
        """Reductions over ranks that the device's communication library has, such as ``"sum"`` and ``"avg"``.

        By the names of ``torch.distributed.ReduceOp``, in lower case. A backend does what is missing in another way: a
        mean as a sum and a division.
        Default: None, for all that torch has.
        """

    # --------------------------------------------------------------------------------------------------------- state

    @_hook("backend", returns=False)
    def save_state(self, run: Run, bundle: Bundle, directory: Path) -> None:
        """Write models and optimizers of the run into an existing empty directory. Called on every rank.

        Default: each model's full weights as safetensors and each optimizer's state, from the main process.

        :param bundle: Everything prepared so far.
        :param directory: On the storage all ranks of a machine see. Core renames it when every rank is done.
        """

    @_hook("backend", returns=False)
    def load_state(self, run: Run, bundle: Bundle, directory: Path, strict: bool) -> None:
        """Read what ``save_state`` wrote, in place. Called on every rank. Must not unpickle code.

        Default: reads what the default of ``save_state`` writes, and pieces in the format of
        ``drivetrain.checkpoint.sharded_files``.
        """

    @_hook("backend")
    def model_state(self, run: Run, model: nn.Module) -> dict[str, Tensor]:
        """The full state dict of a prepared model, with the names of the user's own module. Called on every rank.

        Complete at least on rank 0; other ranks may return an empty dict. Default: ``unwrap(model).state_dict()``.
        """

    @_hook("backend", returns=False)
    def load_model_state(self, run: Run, model: nn.Module, state: Mapping[str, Tensor], strict: bool) -> None:
        """Load a full state dict into a prepared model, in place. Called on every rank with the full dict on each.

        Default: ``unwrap(model).load_state_dict(state, strict=strict)``.
        """

    @_hook("backend")
    def optimizer_state(self, run: Run, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """The full state dict of an optimizer, in the format of ``Optimizer.state_dict``. Called on every rank.

        Complete at least on rank 0. Default: ``optimizer.state_dict()``.
        """

    @_hook("backend", returns=False)
    def load_optimizer_state(
        self, run: Run, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load what ``optimizer_state`` returned, in place. Called on every rank with the full dict on each.

        Default: ``optimizer.load_state_dict``.
        """

    @_hook("precision")
    def precision_state(self, run: Run, models: Sequence[nn.Module]) -> dict[str, Any]:
        """What the precision itself has learnt in training, such as scales, as tensors and plain values.

        Called on every rank when a state is saved; each rank's answer is its own. It is no part of ``model_state``, so
        that weights can be used in any other precision. Default: nothing.

        :param models: All prepared ones.
        """

    @_hook("precision", returns=False)
    def load_precision_state(self, run: Run, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Put back what ``precision_state`` returned. Called on every rank, once models and optimizers are loaded.

        Default: nothing.

        :param models: As in ``precision_state``.
        :param state: This rank's, or rank 0's on a rank there was not; empty if the checkpoint has none of this
            precision.
        """

    @_hook("backend")
    def unwrap(self, run: Run, model: nn.Module) -> nn.Module:
        """The module inside what ``wrap_model`` or ``prepare`` returned.

        Default: the model as it is.
        """

    @_hook("precision")
    def restore_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Take back what ``convert_model`` did: ordinary modules again, in place, that hold the same parameters.

        Called by ``accelerator.unwrap_model(model, keep_fp32_wrapper=False)``. Default: the model as it is.

        :param model: As ``unwrap`` returned it.
        """

    @_hook("backend", "device")
    def rng_state(self, run: Run) -> dict[str, Any]:
        """State of the device's random number generators, as tensors and plain values.

        Default: of ``torch.get_device_module``, empty for the CPU, whose generator core saves itself.
        """

    @_hook("backend", "device", returns=False)
    def set_rng_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Put back what ``rng_state`` returned. Default: what the default of ``rng_state`` returned."""

    # ----------------------------------------------------------------------------------------------- device services
    # A backend whose engine brings a runtime of its own answers them itself; all others leave them to the device.

    @_hook("backend", "device", returns=False)
    def seed(self, run: Run, seed: int) -> None:
        """Seed the device's generators. Core seeds Python, numpy and torch's CPU generator itself.

        Default: ``manual_seed_all`` of ``torch.get_device_module``, where there is one.
        """

    @_hook("backend", "device", returns=False)
    def synchronize(self, run: Run) -> None:
        """Wait until the device has done all that was queued. Default: ``torch.accelerator.synchronize``."""

    @_hook("backend", "device", returns=False)
    def empty_cache(self, run: Run) -> None:
        """Give cached device memory back.

        Default: ``empty_cache`` of torch's device module, else of ``torch.accelerator``.
        """

    @_hook("backend", "device")
    def memory(self, run: Run) -> dict[str, int]:
        """Bytes of memory of this process's device: ``allocated``, ``reserved``, ``peak`` and ``total``.

        Numbers that can't be had are left out. Default: of torch's device module, else of ``torch.accelerator``; for
        the CPU the process's resident set and the machine's memory.
        """

    @_hook("backend", "device")
    def make_scaler(self, run: Run) -> Any:
        """A gradient scaler with the interface of ``torch.amp.GradScaler``, set up by ``run.policy``.

        Called only when the policy scales losses and the backend does not own the scaler. Default:
        ``torch.amp.GradScaler`` for the device type.
        """

    @_hook("backend", "device")
    def bf16_supported(self, run: Run) -> bool:
        """Whether bfloat16 computations work on the device. Default: what ``compute_dtypes`` says, else True."""

    @_hook("backend", "device")
    def compile_backend(self, run: Run) -> str:
        """Backend for ``torch.compile`` when the user named none. Default: ``"inductor"``."""

    @_hook("backend", "device")
    def profiler_activities(self, run: Run) -> list[Any]:
        """``torch.profiler.ProfilerActivity`` values to record on this device. Default: those torch supports here."""

    @_hook("backend", "device")
    def is_out_of_memory(self, run: Run, error: BaseException) -> bool:
        """Whether an exception means that the device ran out of memory.

        Default: ``torch.OutOfMemoryError``, ``MemoryError``, and the messages of torch's allocators.
        """


def hooks() -> Mapping[str, HookInfo]:
    """Every hook of the contract by name, in the order of the contract."""
    return _INFO
