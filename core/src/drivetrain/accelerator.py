"""The facade: what a training loop calls. Every method is a few lines over the contract."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import state
from drivetrain.accumulation import Accumulation, Block, GradientAccumulationPlugin
from drivetrain.arguments import loader_configuration, settings_from_code
from drivetrain.checkpoint.surface import CheckpointMixin
from drivetrain.collectives import CollectivesMixin
from drivetrain.data.surface import LoadersMixin
from drivetrain.forward import autocast
from drivetrain.gradients import Gradients, as_parameter_list
from drivetrain.handlers import AutocastKwargs
from drivetrain.memory import release_memory
from drivetrain.preparation import prepare
from drivetrain.prepared import Prepared
from drivetrain.process import ProcessMixin
from drivetrain.profiling import ProfileKwargs, profile
from drivetrain.tracking.surface import TrackingMixin
from drivetrain.unwrapping import unwrap

if TYPE_CHECKING:
    from drivetrain.checkpoint import ProjectConfiguration
    from drivetrain.config import Resolved
    from drivetrain.data.configuration import DataLoaderConfiguration
    from drivetrain.plugin import KwargsHandler
    from drivetrain.world import Run

__all__ = ["Accelerator"]

logger = logging.getLogger(__name__)


class Accelerator(ProcessMixin, CollectivesMixin, LoadersMixin, CheckpointMixin, TrackingMixin):
    """Runs one training loop on whatever the launch environment provides.

    Pass models, optimizers, loaders and schedulers through :meth:`prepare`, use what it returns, and call
    :meth:`backward` where the loss would. Everything else is ordinary PyTorch.

    Arguments given here win over the command line, the environment and the YAML; None leaves the choice to those.

    Args:
        device_placement: Whether ``prepare`` moves models and loaders place their batches on the device.
        split_batches: Deprecated place of ``DataLoaderConfiguration.split_batches``.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, or any installed precision or family of them.
        gradient_accumulation_steps: Micro-batches in a group, N. The mean of their gradients makes one update.
        cpu: Run on the CPU even where there is an accelerator.
        dataloader_config: How loaders are sharded.
        gradient_accumulation_plugin: The same as ``gradient_accumulation_steps``, with more choices.
        step_scheduler_with_optimizer: Whether schedulers move with real updates only; if not, ``scheduler.step()`` is
            the scheduler's own.
        scheduler_counts: ``"shards"``: one update moves a scheduler by as many steps as there are data-parallel shards,
            so that a schedule written in batches of the unprepared loader is right in any world. ``"updates"``: by one.
        kwargs_handlers: Settings as objects, such as ``AutocastKwargs``; at most one of each class.
        backend: Name of an installed backend.
        device: ``"auto"``, ``"cpu"`` or the name of an installed device plugin.
        rng_types: Accepted for scripts that pass it; the order of samples is a function of seed and epoch here, so no
            generator needs to be synchronized.
        project_dir: Directory of the project, for checkpoints and trackers.
        project_config: The same, with more choices.
        log_with: Trackers that ``log`` hands metrics to: a name, an object, a list of them, or ``"all"``.
        config_file: YAML to read instead of the default one.
        **plugins: Keywords that installed plugins claim, such as ``fsdp_plugin``; and ``dynamo_backend`` or
            ``dynamo_plugin``, a compiler's name or a ``TorchDynamoPlugin``. ``dispatch_batches``, ``even_batches`` and
            ``use_seedable_sampler`` are taken as ``split_batches`` is.

    Raises:
        ConfigError: A setting is unknown or impossible.
        StateConflictError: The process runs already, with another value of a setting given here.
        TypeError: No installed plugin claims a keyword.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        scheduler_counts: Literal["shards", "updates"] = "shards",
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        backend: str | None = None,
        device: str | None = None,
        rng_types: Sequence[str] | None = None,
        project_dir: Any = None,
        project_config: ProjectConfiguration | None = None,
        log_with: Any = None,
        config_file: Any = None,
        **plugins: Any,
    ) -> None:
        if scheduler_counts not in ("shards", "updates"):
            raise ValueError(f"scheduler_counts must be 'shards' or 'updates'; got {scheduler_counts!r}")
        plugins["split_batches"] = split_batches
        self.dataloader_config = loader_configuration(dataloader_config, plugins)
        code, self._handlers = settings_from_code(
            handlers=kwargs_handlers or (),
            keywords=plugins,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            backend=backend,
            device="cpu" if cpu else device,
        )
        runtime = state.ensure(code, config_file)
        self.run: Run = runtime.run
        self.state = state.AcceleratorState()
        self.gradient_state = state.GradientState()
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._scheduler_counts = scheduler_counts
        self._autocast_handler: Any = self._handlers.get(AutocastKwargs)
        self._autocast = self.run.hooks.bind("autocast")
        self._accumulate = self.run.hooks.bind("accumulate")
        self._place = self.run.hooks.bind("place")
        self.known = Prepared(self.run)
        self.gate = Accumulation(
            self._choose_steps(code.get("gradient_accumulation_steps"), runtime.resolved),
            gradient_accumulation_plugin or GradientAccumulationPlugin(),
            lambda last: self._accumulate(self.run, self.known.wrapped_models, last),
        )
        self._set_up_project(project_dir, project_config)
        self._set_up_tracking(log_with, self.logging_dir)
        self.scaler = self._make_scaler()
        self.gradients = Gradients(self.run, self.gate, self.known.wrapped_models, self.known.optimizers, self.scaler)
        state.adopt(self)

    def _choose_steps(self, in_code: int | None, resolved: Resolved) -> int:
        """Micro-batches in a group: each Accelerator's own affair, so not part of what the run was started with."""
        configured = self.run.config.gradient_accumulation_steps
        origin = resolved.origin("gradient_accumulation_steps")
        if in_code is None:
            return configured
        if self.run.world.rank == 0 and in_code != configured and origin.source != "default":
            logger.info("gradient_accumulation_steps=%d (Accelerator(...); %s said %d)", in_code, origin, configured)
        return in_code

    def _make_scaler(self) -> Any:
        if self.run.policy.loss_scale is None or self.run.capabilities.owns_scaler:
            return None
        return self.run.hooks.make_scaler(run=self.run)

    # ---------------------------------------------------------------------------------------------------- prepare

    def init_context(self) -> contextlib.AbstractContextManager[Any]:
        """Context to build a model in that is too big to exist whole on every rank; ``prepare`` completes it.

        Where the backend does not cut models it is built as written.
        """
        context: contextlib.AbstractContextManager[Any] = self.run.hooks.init_context(run=self.run)
        return context

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Adapt models, optimizers, loaders and schedulers to the run. Use what is returned, not what was passed.

        Anything else is returned untouched, and so is what was prepared before.

        Args:
            *objects: In any order.
            device_placement: For each object whether it is moved (a model) or places its batches (a loader); None in
                it: as set for the Accelerator.

        Returns:
            As many objects in the same order; the object itself for a single one.

        Raises:
            ValueError: ``device_placement`` is no list as long as ``objects``, or an object comes twice.
            TypeError: A list, tuple or dict holds what could be prepared.
            DrivetrainError: An optimizer holds parameters of no prepared model, in a run of several shards.
        """
        if device_placement is None:
            device_placement = [None] * len(objects)
        if not isinstance(device_placement, (list, tuple)) or len(device_placement) != len(objects):
            raise ValueError(
                f"device_placement must be a list of one entry for each of {len(objects)} objects; "
                f"got {device_placement!r}"
            )
        placed = [self.device_placement if flag is None else flag for flag in device_placement]
        prepared = prepare(self, objects, placed)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """``prepare`` for one model.

        Args:
            model: Any module.
            device_placement: Whether it is moved; None: as set for the Accelerator.
            evaluation_mode: It will not be trained, so it is moved and given its precision, but not distributed.
        """
        placed = self.device_placement if device_placement is None else device_placement
        made: nn.Module = prepare(self, [model], [placed], evaluation_mode)[0]
        return made

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """``prepare`` for one optimizer."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """``prepare`` for one loader, with a ``DataLoaderConfiguration.slice_fn_for_dispatch`` of its own."""
        with self._slicing_by(slice_fn_for_dispatch):
            return self.prepare(data_loader, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """``prepare`` for one learning-rate scheduler."""
        return self.prepare(scheduler)

    # --------------------------------------------------------------------------------------------------- training

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients: in place of ``loss.backward()``.

        Divides the loss by the number of micro-batches in the group and scales it where the precision needs that.

        Args:
            loss: Mean over the micro-batch, 0-d.
            **options: For ``Tensor.backward``, such as ``retain_graph``.
        """
        self.gradients.backward(loss, options)

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """One micro-batch of a group; optimizers in it step only at the group's end.

        Args:
            *models: Models trained in the block; none: all prepared ones. Blocks that name different models count
                apart, so that several models may be accumulated in one iteration.

        Raises:
            DrivetrainError: A model is the one given to ``prepare``, not the one it returned.
        """
        self.known.check_returned(models)
        return Block(self.gate, models)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Any:
        """Context in which gradients are not reduced over ranks.

        Args:
            model: A prepared model; None: all of them.
        """
        models = self.known.wrapped_models if model is None else [model]
        self.known.check_returned(models)
        with self._accumulate(self.run, models, False):
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Any:
        """Context whose next ``backward`` reduces gradients over ranks, though the forward was run under ``no_sync``.

        Args:
            model: A prepared model.
        """
        self.known.check_returned([model])
        with self.run.hooks.sync_in_backward(run=self.run, model=model):
            yield

    @property
    def sync_gradients(self) -> bool:
        """Whether optimizers step on the current micro-batch."""
        return self.gate.frame.sync

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a group; may be set between groups."""
        return self.gate.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be a whole number from 1; got {steps!r}")
        self.gate.set_steps(steps)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale gradients so that their norm over all ranks and shards is at most ``max_norm``.

        Args:
            parameters: A tensor or an iterable of them, of prepared models.
            max_norm: The largest norm allowed.
            norm_type: p of the p-norm; may be ``inf``.

        Returns:
            The norm before clipping, a 0-d tensor, the same on every rank; None while a group is still being
            accumulated, since there is no gradient yet to measure.
        """
        if not self.gate.frame.sync:
            return None
        wanted = as_parameter_list(parameters)
        self.gradients.finish_those_with(wanted, self.known.optimizers)
        return self.gradients.clip_grad_norm(wanted, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``; nothing while a group is being accumulated."""
        if not self.sync_gradients:
            return
        wanted = as_parameter_list(parameters)
        self.gradients.finish_those_with(wanted, self.known.optimizers)
        self.gradients.clip_grad_value(wanted, float(clip_value))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients to their true size before looking at them. Only needed outside the clipping methods.

        Args:
            optimizer: A prepared optimizer or a list of them; None: all.
        """
        chosen = self.known.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            if self.sync_gradients:
                self.gradients.finish(one)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Context in which operations run in the precision's compute dtype, for code that is no model's forward.

        Args:
            autocast_handler: Replaces the one given to the Accelerator.
        """
        return autocast(lambda: self._autocast(self.run, None), autocast_handler or self._autocast_handler)

    def autocast_of(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """The context in which the forward of a prepared model runs."""
        return autocast(lambda: self._autocast(self.run, model), self._autocast_handler)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last due ``step`` did not update."""
        return any(optimizer.step_was_skipped for optimizer in self.known.optimizers)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Context that records where the time goes; gives a ``torch.profiler.profile``. Every rank must enter it.

        Args:
            profile_handler: Replaces the one given to the Accelerator.
        """
        given: Any = profile_handler or self._handlers.get(ProfileKwargs) or ProfileKwargs()
        return profile(self.run, given)

    # ----------------------------------------------------------------------------------------- models and loaders

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The module inside a prepared model.

        Args:
            model: Prepared or not.
            keep_fp32_wrapper: Keep the autocast around its forward; False gives it its own forward back, and ordinary
                modules in place of those that the precision put into it, with the same parameters.
            keep_torch_compile: Keep it compiled.
        """
        return unwrap(self.run, model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared, and give its memory back: ``a, b = accelerator.free_memory(a, b)``.

        Memory is free once no variable refers to the objects, so bind theirs to what is returned.

        Args:
            *objects: Of any kind.

        Returns:
            As many Nones.
        """
        self.known.forget()
        self.gate.forget_groups()
        return release_memory(*objects)

    clear = free_memory

    def handlers(self) -> Mapping[type, KwargsHandler]:
        """The handlers given in code, by class."""
        return self._handlers

    @property
    def place(self) -> Callable[[Any], Any]:
        """Brings a batch from the host to the device."""
        return functools.partial(self._place, self.run, non_blocking=self.dataloader_config.non_blocking)

    def scheduler_multiplier(self) -> int:
        """Steps of a prepared scheduler for one update."""
        if self._scheduler_counts == "updates" or self.split_batches:
            return 1
        return self.run.world.data_size

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self
