"""From a model to one that is cut over ranks: refused, planned, brought to the device, cut, and remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.bundle import Bundle
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.world import Run
from drivetrain_backends.pieces import Piece
from drivetrain_backends.replicas import check_same_model
from drivetrain_fsdp import mesh, norms
from drivetrain_fsdp.config import Fsdp1Config, FsdpConfig, MixedPrecisionConfig
from drivetrain_fsdp.recomputing import RecomputedForward
from drivetrain_fsdp.reduction import Sharded, average_in_backward, switched
from drivetrain_fsdp.units import make_plan
from drivetrain_fsdp.values import bring, check_values, widen

__all__ = ["Sharding"]


class Sharding:
    """All models of a run that were cut, and what is done with them.

    Args:
        section: Of the configuration, for messages.
        config: The section.
        engine: The module that talks to torch: ``fsdp1`` or ``fsdp2``.
    """

    def __init__(self, section: str, config: FsdpConfig | Fsdp1Config, engine: Any) -> None:
        self.section = section
        self.config = config
        self.engine = engine
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """What is known of each, by the model as the user holds it."""
        self._originals: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The class of its model, by parameter as it was before it was cut."""
        self.accumulated = False
        """Whether a backward may have left gradients unreduced, ever."""

    @property
    def models(self) -> list[nn.Module]:
        """All of them that are still alive."""
        return list(self._known)

    @property
    def reducing(self) -> list[nn.Module]:
        """Those whose backward reduces gradients now."""
        return [model for model, sharded in self._known.items() if sharded.reduces]

    # ------------------------------------------------------------------------------------------------------- prepare

    def refuse(self, run: Run, models: Sequence[nn.Module]) -> None:
        """Raise what can be known before anything is changed, the same on all ranks.

        Raises:
            ConfigError: A setting can't be had in this run.
            DrivetrainError: Models share parameters, or one is cut already.
        """
        if run.world.mesh is None:
            return
        self.engine.check(run, self.config, run.world.mesh.size(-1))
        _check_precision(run, self.section, self.config.mixed_precision_policy)
        owners: dict[int, int] = {}
        for index, model in enumerate(models):
            if self.engine.is_wrapped(model) or any(isinstance(p, DTensor) for p in model.parameters()):
                raise DrivetrainError(f"{type(model).__name__} is sharded already; give prepare the plain module")
            for name, parameter in model.named_parameters():
                other = owners.setdefault(id(parameter), index)
                shared_with = type(models[other]).__name__ if other != index else self._originals.get(parameter)
                if shared_with is not None:
                    raise DrivetrainError(
                        f"{type(model).__name__} shares the parameter {name!r} with {shared_with}. Two models can't be "
                        f"cut over ranks with a parameter in common: put both in one module, and prepare that"
                    )

    def shard(self, run: Run, model: nn.Module) -> nn.Module:
        """Cut a model; returns what the user is to hold.

        Args:
            run: The run.
            model: Equal in shape on all ranks. With values, unless they come from rank 0.

        Raises:
            CollectiveMismatchError: The model differs between ranks.
            ConfigError: A setting matches nothing in it.
            DrivetrainError: It can't be cut.
        """
        if run.world.mesh is None or not any(True for _ in model.parameters()):
            return model
        sync = self.config.sync_module_states
        check_same_model(run, model)
        check_values(run, model, sync)
        policy: MixedPrecisionConfig | None = self.config.mixed_precision_policy
        if run.policy.compute is not None or (policy is not None and policy.param_dtype is not None):
            widen(model)
        plan = make_plan(self.section, model, self.config, self.engine.FROZEN_COUNTS)
        for parameter in model.parameters():
            self._originals[parameter] = type(model).__name__
        for module in plan.recomputed:
            RecomputedForward.install(module)
        bring(run, plan.wholes(), sync)
        sharded = Sharded(tuple(plan.whole_parameters()))
        made: nn.Module = self.engine.wrap(run, plan, self.config)
        average_in_backward(run, sharded)
        self._known[made] = sharded
        return made

    # ------------------------------------------------------------------------------------------------------ training

    def switched(self, models: Sequence[nn.Module], reduces: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which the backward of these models reduces gradients, or does not."""
        self.accumulated = self.accumulated or not reduces
        return switched(self._known, models, reduces, self.engine.switch)

    def clip_norm(self, run: Run, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip by the global norm; see :func:`norms.clip_norm`."""
        pieces, wholes = self._gradients(parameters)
        group = None if run.world.mesh is None else mesh.shard_group(run.world.mesh)
        return norms.clip_norm(run, pieces, wholes, group, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        """Clamp what this rank holds of every gradient."""
        pieces, wholes = self._gradients(parameters)
        norms.clip_value([*pieces, *wholes], limit)

    def _gradients(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's pieces of gradients, and the gradients that it has as a whole."""
        everywhere = {id(parameter) for sharded in self._known.values() for parameter in sharded.whole}
        pieces: list[Tensor] = []
        wholes: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                cut = self.config.cuts and id(parameter) not in everywhere
                (pieces if cut else wholes).append(self.engine.local(parameter.grad))
        return pieces, wholes

    # --------------------------------------------------------------------------------------------------------- state

    def settle(self, run: Run, bundle: Bundle) -> None:
        """Put cut parameters back in their place, and note which names they have. Every rank calls it.

        A forward with gradients that no backward followed leaves gathered ones there, which no optimizer knows.
        """
        self.engine.refresh(self.models)
        models = bundle.models
        bundle.models = [run.hooks.unwrap(run=run, model=model) for model in models]
        bundle.record()
        bundle.models = models

    def locate(self) -> Callable[[Tensor], Piece]:
        """A function from a tensor of these models to the piece this rank holds."""
        models = self.models
        self.engine.refresh(models)  # by all ranks, as all come here
        found: Callable[[Tensor], Piece] = self.engine.locate(models)
        return found


def _check_precision(run: Run, section: str, policy: MixedPrecisionConfig | None) -> None:
    """Refuse a policy that contradicts the precision of the run."""
    if policy is None or policy.param_dtype in (None, "float32", "float64"):
        return
    precision, compute = run.names["precision"], run.policy.compute
    if compute is not None and compute != policy.param_dtype:
        raise ConfigError(
            f"{section}.mixed_precision_policy.param_dtype: {policy.param_dtype} and mixed_precision: {precision} "
            f"({compute}) contradict each other; leave one of them out, or set both to one dtype"
        )
    if policy.param_dtype == "float16" and run.policy.loss_scale is None:
        raise ConfigError(
            f"{section}.mixed_precision_policy.param_dtype: float16 needs loss scaling, which mixed_precision: "
            f"{precision} does not have; set mixed_precision: fp16, or use bfloat16"
        )
