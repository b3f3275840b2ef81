"""The engines of a run: one for each model that has an optimizer, and what the training loop asks of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import defaults
from drivetrain.errors import DrivetrainError
from drivetrain.nested import leaves
from drivetrain.world import Run
from drivetrain_deepspeed import clipping, partitions
from drivetrain_deepspeed.config import DeepSpeedConfig
from drivetrain_deepspeed.optimizers import Trained
from drivetrain_deepspeed.originals import Frozen, update_frozen

__all__ = ["Engines"]

logger = logging.getLogger(__name__)


class Engines:
    """All engines of a run that are still in use.

    Gradients are added up in the engine however many times ``backward`` is called, and completed, that is reduced over
    ranks as far as they aren't, when they are first clipped or applied. The engine counts nothing itself.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config
        self._trained: weakref.WeakKeyDictionary[Any, Trained] = weakref.WeakKeyDictionary()
        self._untrained: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """Stage 3: engines without an optimizer."""
        self._reached: set[Any] = set()
        """Engines whose outputs the current backward has come to."""
        self._touched: set[Any] = set()
        """Engines whose parameters it has come to."""

    def add(self, engine: Any, trained: Trained | None) -> None:
        """Take an engine in.

        Args:
            engine: As ``deepspeed.initialize`` returned it.
            trained: What is kept of it; None for one without an optimizer.
        """
        if trained is None:
            self._untrained[engine] = None
            engine._backward_prologue = _nothing  # it would prepare ZeRO's optimizer for a backward, and has none
            return
        self._trained[engine] = trained
        engine.set_gradient_accumulation_boundary(False)
        engine.register_forward_hook(self._watch_outputs)
        touch = functools.partial(self._touch, weakref.ref(engine))
        trained.hooks = [p.register_hook(touch) for p in engine.module.parameters() if p.requires_grad]

    def engine_of(self, optimizer: Optimizer) -> Any:
        """The engine that steps an optimizer.

        Raises:
            DrivetrainError: There is none.
        """
        for engine, trained in self._trained.items():
            if trained.face is optimizer:
                return engine
        raise DrivetrainError(f"this {type(optimizer).__name__} was not prepared together with its model")

    def is_engine(self, model: Any) -> bool:
        """Whether a model is one of these engines."""
        return model in self._trained or model in self._untrained

    def owners(self) -> dict[int, Any]:
        """The optimizer inside of an engine, by the id of each parameter of its module."""
        engines = (*self._trained, *self._untrained)
        return {id(parameter): engine.optimizer for engine in engines for parameter in engine.module.parameters()}

    def dtypes(self, model: Any) -> Mapping[str, torch.dtype]:
        """Dtypes a model had before the engine cast it, by name; empty for one that trains nothing."""
        trained = self._trained.get(model)
        return {} if trained is None else trained.dtypes

    def frozen(self) -> dict[int, Frozen]:
        """What this rank keeps of parameters that are not trained and were rounded, by their ids."""
        return {key: kept for trained in self._trained.values() for key, kept in trained.frozen.items()}

    def update_parameters(self, run: Run) -> None:
        """Give all parameters the values of the master weights, after these were written. Every rank calls it."""
        if self.config.stage == 0:
            return
        update_frozen(run, self.frozen())
        for engine in (*self._trained, *self._untrained):
            partitions.update_parameters(engine.optimizer)

    def tell_batch_size(self, size: int) -> None:
        """Tell engines how many samples a micro-batch of one process has."""
        for engine in self._trained:
            engine.set_train_micro_batch_size(size)

    # ---------------------------------------------------------------------------------------------------- backward

    def backward(self, loss: Tensor, models: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        """Compute gradients, through any number of engines."""
        training = [engine for engine in models if engine in self._trained] or list(self._trained)
        for engine in training:
            if self._trained[engine].pending and hasattr(engine.optimizer, "clear_backward_seen_flag"):
                # A second backward without a forward in between would be taken for the rest of the first.
                engine.optimizer.clear_backward_seen_flag()
        loss = self._scaled(loss, training)
        self._reached.clear()
        self._touched.clear()
        with self._expecting_backward():
            loss.backward(**options)
        for engine in self._reached:
            self._trained[engine].pending = True
        around = [engine for engine in self._touched if not self._trained[engine].pending]
        self._reached.clear()
        self._touched.clear()
        for engine in around:
            self._refuse_going_around(engine)

    def _watch_outputs(self, engine: Any, args: Any, output: Any) -> None:
        """Note that a backward comes to an engine, once it does."""
        for leaf in leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(functools.partial(self._note, engine))

    def _note(self, engine: Any, gradient: Tensor) -> None:
        if engine in self._trained:  # and not released since
            self._reached.add(engine)
            if self._trained[engine].complete:
                self._reopen(engine)

    def _touch(self, reference: weakref.ref[Any], gradient: Tensor) -> None:
        """Note that a backward comes to parameters of an engine."""
        engine = reference()
        if engine in self._trained:
            self._touched.add(engine)

    def _refuse_going_around(self, engine: Any) -> None:
        """The engine takes part in forward and backward alike: what it saw no forward of is lost to it."""
        name = type(engine.module).__name__
        raise DrivetrainError(
            f"gradients of {name} come from outside of its forward, so that the engine would not train on them. "
            f"Compute the loss in forward (which may call other methods), and call the model that prepare returned"
        )

    def _reopen(self, engine: Any) -> None:
        """Go on adding to gradients that were completed already, for having been clipped."""
        if self.config.stage == 0:  # equal on all ranks by now, which one more reduction leaves them
            self._trained[engine].complete = False
            engine.set_gradient_accumulation_boundary(False)
            return
        raise DrivetrainError(
            f"gradients of {type(engine.module).__name__} were clipped and not applied yet, so nothing can be added to "
            f"them any more; call backward before clipping, or step or zero_grad after it"
        )

    def _scaled(self, loss: Tensor, training: Sequence[Any]) -> Tensor:
        """The loss multiplied by the engines' scale, where they scale: the smallest, for all that may share it."""
        scaling = [engine for engine in training if _needs_scaler(engine)]
        if not scaling:
            return loss
        scale = min(partitions.loss_scale(engine.optimizer) for engine in scaling)
        for engine in scaling:
            before = partitions.loss_scale(engine.optimizer)
            if before != scale and self._trained[engine].pending:
                raise DrivetrainError(
                    f"models whose loss scales differ ({before:g} and {scale:g}) can't share a loss in the middle of a "
                    f"group of micro-batches; name the models in accumulate(...)"
                )
            engine.optimizer.loss_scale = scale
            engine._manual_backward_expected = True
        return loss.float() * scale

    @contextlib.contextmanager
    def _expecting_backward(self) -> Iterator[None]:
        """Engines without ZeRO's optimizer refuse a backward that they did not start; here they expect one."""
        waiting = [engine for engine in self._trained if not engine._support_torch_style_backward]
        for engine in waiting:
            engine._running_engine_backward = True
        try:
            yield
        finally:
            for engine in waiting:
                engine._running_engine_backward = False
            for engine in self._trained:
                engine._manual_backward_expected = False

    # ------------------------------------------------------------------------------------- between backward and step

    def complete(self, engine: Any) -> bool:
        """Reduce what is not reduced yet; returns whether there are any gradients. Every rank calls it."""
        trained = self._trained[engine]
        if not trained.pending:
            return False
        if not trained.complete:
            trained.complete = True
            engine.set_gradient_accumulation_boundary(True)
            if engine.zero_optimization_partition_gradients():
                engine.optimizer.finalize_gradient_accumulation_boundary()
            else:
                engine.allreduce_gradients()
        return True

    def _parts(self, parameters: Sequence[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
        """Parameters that have gradients, by the optimizer of the engine that trains them."""
        wanted = {id(parameter): parameter for parameter in parameters}
        parts: dict[Any, list[nn.Parameter]] = {}
        known = 0
        for engine, trained in self._trained.items():
            own = [wanted[key] for key in wanted if key in trained.parameters]
            known += len(own)
            if own and self.complete(engine):
                parts[engine.optimizer] = own
        if known < len(wanted):
            raise DrivetrainError(
                f"{len(wanted) - known} of the {len(wanted)} parameters to be clipped are of no model that was "
                f"prepared with an optimizer"
            )
        return parts

    def clip_norm(self, run: Run, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """By the norm over all ranks, of whole models or of any of their parameters."""
        parts = self._parts(parameters)
        if self.config.stage == 0:
            return defaults.clip_grad_norm(run, parameters, max_norm, norm_type)
        if not parts:
            return torch.zeros((), device=run.world.device)
        return clipping.clip_norm(run, parts, max_norm, norm_type)

    def clip_value(self, run: Run, parameters: Sequence[nn.Parameter], value: float) -> None:
        """Clamp what each rank holds."""
        parts = self._parts(parameters)
        if self.config.stage == 0:
            defaults.clip_grad_value(run, parameters, value)
        else:
            clipping.clip_value(parts, value)

    def scale(self, run: Run, optimizer: Optimizer, factor: float) -> None:
        """Multiply reduced gradients by a number."""
        engine = self.engine_of(optimizer)
        if not self.complete(engine):
            return
        if self.config.stage == 0:
            defaults.scale_gradients(run, optimizer, factor)
        else:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            partitions.update_gradients(engine.optimizer, parameters, lambda gradient: gradient.mul_(factor))

    # -------------------------------------------------------------------------------------------------------- step

    def step(self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Update one model; returns whether the engine did."""
        if closure is not None:
            raise DrivetrainError("optimizer.step(closure) is not offered: the engine steps with the gradients it has")
        engine = self.engine_of(optimizer)
        trained = self._trained[engine]
        optimizer._opt_called = True  # a schedule warns if it never sees a step, and the engine steps a copy
        if not self.complete(engine):
            return True  # as torch's optimizers, which leave alone what has no gradient
        if self.config.clipping:
            self.clip_norm(run, list(engine.module.parameters()), self.config.clipping, 2.0)
        trained.hand_over()
        engine.step()
        if self.config.stage > 0:
            partitions.clear_kept(engine.optimizer)
        self._forget_gradients(engine)
        return bool(engine.was_step_applied())

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Drop gradients that no step has used."""
        engine = self.engine_of(optimizer)
        if self.config.stage == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        elif self._trained[engine].pending:
            partitions.clear_gradients(engine.optimizer)
        self._forget_gradients(engine)

    def _forget_gradients(self, engine: Any) -> None:
        trained = self._trained[engine]
        trained.pending = trained.complete = False
        engine.set_gradient_accumulation_boundary(False)

    def release(self, models: Sequence[nn.Module]) -> None:
        """Let go of models: their engines can't be used afterwards."""
        for engine in filter(self.is_engine, models):
            engine.destroy()
            trained = self._trained.pop(engine, None)
            for hook in [] if trained is None else trained.hooks:
                hook.remove()
            self._untrained.pop(engine, None)

    def close(self) -> None:
        """Let go of all models."""
        self.release([*self._trained, *self._untrained])


def _nothing() -> None:
    return None


def _needs_scaler(engine: Any) -> bool:
    return engine._support_torch_style_backward and engine.fp16_enabled()
