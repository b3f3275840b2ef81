"""Version 2: torch's ``fully_shard``. Parameters become DTensors in place; the model stays the user's own object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drivetrain.errors import ConfigError
from drivetrain.world import Run
from drivetrain_backends.pieces import piece_of
from drivetrain_fsdp import gathering
from drivetrain_fsdp.config import FsdpConfig
from drivetrain_fsdp.reduction import watch_outside_forward
from drivetrain_fsdp.units import Plan
from drivetrain_fsdp.values import bring

__all__ = ["check", "discard_unreduced", "local", "locate", "refresh", "switch", "unwrap", "wrap"]

FROZEN_COUNTS = False
"""Frozen parameters of a unit may be of another dtype than its trained ones."""


def check(run: Run, config: FsdpConfig, ranks: int) -> None:
    """Refuse settings that this run can't have.

    Args:
        run: The run.
        config: The section.
        ranks: Over how many the model is cut.

    Raises:
        ConfigError: There is one.
    """
    reshard = config.reshard_after_forward
    if not isinstance(reshard, bool) and ranks % reshard:
        raise ConfigError(
            f"fsdp.reshard_after_forward: {reshard} does not divide the {ranks} ranks that the model is cut over"
        )


def wrap(run: Run, plan: Plan, config: FsdpConfig) -> nn.Module:
    """Cut a model, unit by unit, each brought to the device just before. Returns the same object."""
    model = plan.model
    whole = set(plan.whole_parameters())
    own_formats = gathering.in_own_formats(model)
    offload = CPUOffloadPolicy(pin_memory=run.world.device.type != "cpu") if config.cpu_offload else OffloadPolicy()
    for unit in (*plan.units, model):
        bring(run, plan.members(unit), config.sync_module_states)
        fully_shard(
            unit,
            mesh=run.world.mesh,
            reshard_after_forward=_reshard(config, unit is model),
            mp_policy=_mixed_precision(run, config, unit is model),
            offload_policy=offload,
            ignored_params=whole,
        )
        if own_formats:
            unit.set_custom_all_gather(gathering.AllGatherOfBytes())
    _prefetch(plan, config)
    ops = run.hooks.reduce_ops(run=run)
    if ops is not None and "avg" not in ops:
        for unit in (*plan.units, model):
            unit.set_force_sum_reduction_for_comms(True)  # and divides: not every communication library has a mean
    model.register_forward_hook(_free_after_evaluation)
    cut = {id(held.sharded_param) for held in _held([model])}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in cut]
    watch_outside_forward(type(model).__name__.removeprefix("FSDP"), named)
    return model


def _free_after_evaluation(model: nn.Module, inputs: Any, outputs: Any) -> None:
    """Put the cut parameters back in their place where no backward will do it.

    Code that looks at ``model.parameters()`` after an evaluation, a checkpoint for one, must find those that the
    optimizers know. Here, since every rank comes here: if one rank alone freed what it had gathered, the ranks would no
    longer agree on what the next forward has to gather.
    """
    if not torch.is_grad_enabled():
        refresh([model])


def _reshard(config: FsdpConfig, root: bool) -> bool | int | None:
    # None is torch's own choice, which frees all but the outermost unit's: backward starts with those.
    return None if config.reshard_after_forward is True and root else config.reshard_after_forward


def _mixed_precision(run: Run, config: FsdpConfig, root: bool) -> MixedPrecisionPolicy:
    policy = config.mixed_precision_policy
    if policy is None:
        return MixedPrecisionPolicy(reduce_dtype=run.policy.reduce_dtype)
    return MixedPrecisionPolicy(
        param_dtype=_dtype(policy.param_dtype),
        reduce_dtype=_dtype(policy.reduce_dtype),
        output_dtype=_dtype(policy.returned_dtype) if root else None,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _prefetch(plan: Plan, config: FsdpConfig) -> None:
    """Gather units ahead, in the order in which the model defines them."""
    order: list[Any] = [plan.model, *reversed(plan.units)]
    for position, unit in enumerate(order):
        if config.forward_prefetch:
            unit.set_modules_to_forward_prefetch(order[position + 1 : position + 1 + config.forward_prefetch])
        if config.backward_prefetch and position:
            first = max(1, position - config.backward_prefetch)
            unit.set_modules_to_backward_prefetch(order[first:position][::-1])


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module: the model itself."""
    return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether there is a unit in a model already."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def switch(model: Any, reduces: bool) -> None:
    """Say whether backward reduces gradients, or adds them up unreduced."""
    model.set_requires_gradient_sync(reduces)


def discard_unreduced(models: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Drop what was added up for these parameters and not reduced: it is in no ``.grad`` yet."""
    wanted = {id(parameter) for parameter in parameters}
    for held in _held(models):
        if id(held.sharded_param) in wanted:
            held.unsharded_accumulated_grad = None
            gathered = getattr(held, "_unsharded_param", None)
            if gathered is not None:
                gathered.grad = None


def _held(models: Iterable[nn.Module]) -> Iterator[Any]:
    """torch's records of parameters. It has no public way to what was accumulated."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
                for group in [state._fsdp_param_group] if several is None else several:
                    yield from group.fsdp_params if group is not None else ()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locate(models: Sequence[nn.Module]) -> Any:
    """A function from a parameter, buffer or optimizer state of these models to the piece this rank holds."""
    return piece_of


def refresh(models: Sequence[nn.Module]) -> None:
    """Free gathered parameters, which would not notice that the pieces change."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
