"""From a loss to an update: dividing, scaling, unscaling, clipping and stepping, in the one order that is right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.clipping import check_clipping
from drivetrain.errors import DrivetrainError, add_note
from drivetrain.state import living_accelerators

if TYPE_CHECKING:
    from drivetrain.accumulation import Accumulation
    from drivetrain.optimizer import AcceleratedOptimizer
    from drivetrain.world import Run

__all__ = ["Gradients"]

logger = logging.getLogger(__name__)


class Gradients:
    """The hot path of one Accelerator. Hooks are bound once, here.

    The scaler is updated once per group of micro-batches, not once per optimizer: at the first backward of the next
    group, when no optimizer can still need the old scale.
    """

    def __init__(
        self,
        run: Run,
        gate: Accumulation,
        models: Sequence[nn.Module],
        optimizers: Sequence[AcceleratedOptimizer],
        scaler: Any,
    ) -> None:
        self.run = run
        self.gate = gate
        self.models = models
        self.optimizers = optimizers
        self.scaler = scaler
        self.backwards = 0
        """Calls of ``backward`` so far."""
        self._scale_used_at: int | None = None
        self._warned_unfed = run.world.data_size == 1
        self._mentioned_short_group = run.world.rank != 0
        self._warned_unprepared = run.world.rank != 0
        bind = run.hooks.bind
        self._backward = bind("backward")
        self._takes_options = run.hooks.takes("backward", "options")
        self._clip_grad_norm = bind("clip_grad_norm")
        self._clip_grad_value = bind("clip_grad_value")
        self._scale_gradients = bind("scale_gradients")
        self._step = bind("step")
        self._zero_grad = bind("zero_grad")
        self._after_step = bind("after_step")

    # ---------------------------------------------------------------------------------------------------- backward

    def backward(self, loss: Tensor, options: Mapping[str, Any]) -> None:
        """See ``Accelerator.backward``."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"accelerator.backward takes the loss, a tensor; got {type(loss).__name__}")
        self.backwards += 1
        frame = self.gate.frame
        if not self._warned_unfed and frame.loader is None:
            self._warn_unfed()
        if not self._warned_unprepared and not self.optimizers:
            self._warn_unprepared()
        size = frame.size
        if size != 1:
            loss = loss / size
        if self.scaler is not None:
            self._update_scale_of_last_group()
            loss = self.scaler.scale(loss)
        if options and not self._takes_options:
            raise DrivetrainError(
                f"backward takes no options under {self.run.hooks.owner('backward')}, but got {', '.join(options)}"
            )
        try:
            self._backward(self.run, loss, self.gate.named or self.models, options)
        except Exception as error:
            self.run.hooks.blame(error, "backward")
            self._explain_lost_ranks(error)
            raise

    def _explain_lost_ranks(self, error: Exception) -> None:
        """What a communication library says when another rank does not come names neither a rank nor a cure."""
        world = self.run.world
        text = str(error).lower()
        if world.size > 1 and any(
            sign in text for sign in ("timed out", "timeout", "connection closed", "reset by peer")
        ):
            add_note(
                error,
                f"on rank {world.rank} of {world.size}: another rank ended, or did not run this backward. If ranks "
                f"have different numbers of batches, see accelerator.join_uneven_inputs; how long a rank waits is set "
                f"by collective_timeout",
            )

    def _warn_unfed(self) -> None:
        self._warned_unfed = True
        if any(not each.gate.idle for each in living_accelerators()):
            return  # in a loader that another Accelerator of this process prepared
        logger.warning(
            "rank %d trains outside any prepared loader: unless your own code gives every rank other data, all %d of "
            "them train on the same; pass the loader to prepare and iterate what it returns",
            self.run.world.rank,
            self.run.world.size,
        )

    def _warn_unprepared(self) -> None:
        """Say once that nothing known here will be stepped: what else is can neither be seen nor corrected."""
        world = self.run.world
        if world.size == 1 and (not self.models or (self.scaler is None and self.gate.steps == 1)):
            return  # as without the library: any optimizer will do
        self._warned_unprepared = True
        if any(each.known.optimizers for each in living_accelerators()):
            return  # they are another Accelerator's of this process
        if self.models:
            what = (
                "no optimizer was prepared: one that steps all the same knows nothing of accumulation and loss "
                "scaling, and may hold parameters that are no longer the model's, so that nothing is trained"
            )
        else:
            what = f"no model was prepared: gradients are not averaged over the {world.size} ranks, which drift apart"
        logger.warning("%s. Pass both to accelerator.prepare, and use what it returns", what)

    def _check_backward(self, optimizer: AcceleratedOptimizer) -> None:
        """For a step that follows no backward of the Accelerator: refuse gradients of a bare ``loss.backward()`` where
        they have another size."""
        if self.scaler is None and self.gate.steps == 1:
            return
        if optimizer.has_gradients():
            why = "scale the loss" if self.scaler is not None else "divide the loss by the size of its group"
            raise DrivetrainError(
                f"gradients were computed without accelerator.backward(loss), which would also {why}; call it in place "
                f"of loss.backward(), on the Accelerator that prepared the optimizer. If the optimizer was prepared "
                f"but its loss is another's, do not prepare it"
            )

    def _update_scale_of_last_group(self) -> None:
        batch = self.gate.frame.batch
        # Code outside any loader and block has no micro-batch numbers to tell groups apart: every backward starts one.
        if self._scale_used_at is not None and (batch == 0 or batch != self._scale_used_at):
            self.update_scale()

    def update_scale(self) -> None:
        """Let the scaler grow or back off for the updates since the last time, if there were any."""
        if self._scale_used_at is not None:
            self._scale_used_at = None
            # torch's scaler backs off whatever it is told, so a fixed scale is put back every time.
            scale = self.run.policy.loss_scale
            self.scaler.update(None if scale == "dynamic" else scale)

    # ------------------------------------------------------------------------------------- between backward and step

    def finish(self, optimizer: AcceleratedOptimizer) -> None:
        """Bring an optimizer's gradients to their true size: unscaled, and a mean over the group. Once per group."""
        if optimizer.finished:
            return
        if optimizer.backwards == self.backwards:
            self._check_backward(optimizer)
        optimizer.finished = True
        if self.scaler is not None and optimizer.has_gradients():
            self._scale_used_at = self.gate.frame.batch
            self.scaler.unscale_(optimizer.stepper)
        factor = self.gate.frame.rescale
        if factor != 1.0:
            self._scale_gradients(self.run, optimizer.optimizer, factor)

    def finish_those_with(self, parameters: Sequence[Tensor], optimizers: Iterable[AcceleratedOptimizer]) -> None:
        """``finish`` for the optimizers that hold any of these parameters."""
        if self.scaler is None and self.gate.frame.rescale == 1.0:
            return
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                self.finish(optimizer)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """See ``Accelerator.clip_grad_norm_``; gradients are finished."""
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be a number from 0; got {max_norm}")
        check_clipping(self.run, self.models, parameters, norm_type)
        try:
            norm: Tensor = self._clip_grad_norm(self.run, parameters, max_norm, norm_type)
        except Exception as error:
            self.run.hooks.blame(error, "clip_grad_norm")
            raise
        return norm

    def clip_grad_value(self, parameters: Sequence[nn.Parameter], clip_value: float) -> None:
        """See ``Accelerator.clip_grad_value_``; gradients are finished."""
        try:
            self._clip_grad_value(self.run, parameters, clip_value)
        except Exception as error:
            self.run.hooks.blame(error, "clip_grad_value")
            raise

    # -------------------------------------------------------------------------------------------------------- step

    def step(self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> bool:
        """Update the parameters of one optimizer at the end of a group; returns whether it did."""
        if closure is None and not optimizer.finished and optimizer.backwards == self.backwards:
            self._check_backward(optimizer)
        if not self._mentioned_short_group and self.gate.steps > 1 and self.gate.short:
            self._mention_short_group()
        try:
            if self.scaler is None:
                if self.gate.frame.rescale != 1.0:
                    self.finish(optimizer)
                applied = self._step(self.run, optimizer.optimizer, closure)
            else:
                applied = self._step_scaled(optimizer, closure)
        except Exception as error:
            self.run.hooks.blame(error, "step")
            raise
        optimizer.backwards = self.backwards
        if applied is None:
            raise DrivetrainError(
                f"hook 'step' of {self.run.hooks.owner('step')} returned None; it must say whether it updated anything"
            )
        self._after_step(self.run, optimizer.models, applied)
        return bool(applied)

    def _mention_short_group(self) -> None:
        frame, steps = self.gate.frame, self.gate.steps
        size = round(frame.size / frame.rescale)
        if size >= steps:  # steps was changed within the group
            return
        self._mentioned_short_group = True
        logger.info(
            "the loader ended after %d of %d micro-batches of a group; its gradient is the mean over those %d "
            "(GradientAccumulationPlugin(short_group='fixed') divides by %d)",
            size,
            steps,
            size,
            steps,
        )

    def _step_scaled(self, optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> bool | None:
        if closure is not None:
            raise DrivetrainError(
                "optimizer.step(closure) can't be combined with loss scaling (mixed_precision: fp16): the closure "
                "would be run again on scaled losses; use bf16 or an optimizer without closure"
            )
        if not optimizer.has_gradients():  # the scaler refuses an optimizer it saw no gradient of
            return self._step(self.run, optimizer.optimizer, None)
        self.finish(optimizer)
        return optimizer.stepper.through(self.scaler)

    def zero_grad(self, optimizer: AcceleratedOptimizer, set_to_none: bool) -> None:
        """Clear the gradients of one optimizer."""
        if optimizer.finished and self._scale_used_at is not None:
            # Unscaled gradients were dropped: whatever comes next starts anew, be it in the same micro-batch.
            self._scale_used_at = -1
        optimizer.finished = False
        self._zero_grad(self.run, optimizer.optimizer, set_to_none)

    def step_hook(self, optimizer: Optimizer) -> bool | None:
        """The bound hook ``step`` itself, for the scaler's stand-in of an optimizer."""
        return self._step(self.run, optimizer, None)


def as_parameter_list(parameters: Any) -> list[nn.Parameter]:
    """What torch's clipping functions accept, as a list: one tensor, or an iterable of tensors.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        raise TypeError(f"clipping takes parameters, not a model; pass {type(parameters).__name__}'s .parameters()")
    found = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    if found and not isinstance(found[0], Tensor):
        of_what = "" if found[0] is parameters else f" of {type(found[0]).__name__}"
        raise TypeError(
            f"clipping takes a tensor or an iterable of tensors, such as model.parameters(); got "
            f"{type(parameters).__name__}{of_what}"
        )
    return found
