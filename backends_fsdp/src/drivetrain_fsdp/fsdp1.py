"""Version 1: torch's ``FullyShardedDataParallel``. The parameters of a unit are flattened into one and cut as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.nested import cast_floats
from drivetrain.world import Run
from drivetrain_backends.pieces import Piece, piece_of
from drivetrain_fsdp.config import Fsdp1Config
from drivetrain_fsdp.reduction import watch_outside_forward
from drivetrain_fsdp.units import Plan
from drivetrain_fsdp.values import bring

__all__ = ["ShardedUnit", "check", "give_empty_gradients", "local", "locate", "refresh", "switch", "unwrap", "wrap"]

FROZEN_COUNTS = True
"""What is flattened together must be of one dtype."""


class ShardedUnit(FullyShardedDataParallel):
    """FullyShardedDataParallel that leaves the names of modules and parameters as the user's model has them."""

    returned_dtype: torch.dtype | None = None
    """Dtype of floating-point outputs; None leaves them. Set on the outermost unit alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, its parameters gathered for it."""
        kept = self._kept_for_backward()
        before = None if torch.is_grad_enabled() else list(kept)
        outputs = super().forward(*args, **kwargs)
        if before is not None:  # else views would stay that no backward lets go of, and with them what they look into
            kept[:] = before
        return outputs if self.returned_dtype is None else cast_floats(outputs, self.returned_dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise DrivetrainError(
            f"a {type(self.module).__name__} that is cut over ranks can't be copied: deepcopy it before prepare, and "
            f"prepare both. They are cut alike, so parameters of one can be updated from those of the other"
        )

    def _kept_for_backward(self) -> list[Tensor | None]:
        """Where torch keeps the views that a forward used."""
        found: list[Tensor | None] = [] if self._handle is None else self._handle.flat_param._tensors
        return found

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module and those in it; the wrapper and what it wraps have one name."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)


_STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def check(run: Run, config: Fsdp1Config, ranks: int) -> None:
    """Refuse settings that this run can't have.

    Raises:
        ConfigError: There is one.
    """
    if config.cpu_offload and run.world.device.type == "cpu":
        raise ConfigError("fsdp1.cpu_offload: parameters are in host memory already on a CPU; leave it out")


def wrap(run: Run, plan: Plan, config: Fsdp1Config) -> nn.Module:
    """Cut a model, unit by unit, each brought to the device just before. Returns the outermost wrapper."""
    model = plan.model
    options = _options(run, config)
    if whole := plan.whole_parameters():
        options["ignored_states"] = whole
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # that version 2 is newer is why it is the default
        for unit in plan.units:
            bring(run, plan.members(unit), config.sync_module_states)
            _replace(model, unit, ShardedUnit(unit, **options))
        bring(run, plan.members(model), config.sync_module_states)
        outermost = ShardedUnit(model, **options)
    policy = config.mixed_precision_policy
    if policy is not None and policy.returned_dtype is not None:
        outermost.returned_dtype = getattr(torch, policy.returned_dtype)
    left = set(map(id, whole))
    cut = [(name, parameter) for name, parameter in outermost.named_parameters() if id(parameter) not in left]
    watch_outside_forward(type(model).__name__, cut)
    return outermost


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[name] = new


def _options(run: Run, config: Fsdp1Config) -> dict[str, Any]:
    policy = config.mixed_precision_policy
    prefetch = config.backward_prefetch
    precision = None
    if policy is not None:
        precision = MixedPrecision(
            param_dtype=_dtype(policy.param_dtype),
            reduce_dtype=_dtype(policy.reduce_dtype),
            buffer_dtype=_dtype(policy.buffer_dtype),
            keep_low_precision_grads=policy.keep_low_precision_grads,
            cast_forward_inputs=policy.cast_forward_inputs,
            cast_root_forward_inputs=policy.cast_root_forward_inputs,
        )
    elif run.policy.reduce is not None:
        precision = MixedPrecision(reduce_dtype=run.policy.reduce_dtype)
    return {
        "sharding_strategy": _STRATEGIES[config.strategy],
        "device_mesh": run.world.mesh,
        "device_id": run.world.device,
        "cpu_offload": CPUOffload(offload_params=True) if config.cpu_offload else None,
        "mixed_precision": precision,
        "forward_prefetch": config.forward_prefetch,
        "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch.upper()],
        "limit_all_gathers": config.limit_all_gathers,
        "use_orig_params": True,
    }


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module."""
    return model.module if isinstance(model, ShardedUnit) else model


def is_wrapped(model: nn.Module) -> bool:
    """Whether there is a unit in a model already."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def switch(model: nn.Module, reduces: bool) -> None:
    """Say whether backward reduces gradients, or adds them up unreduced. What ``no_sync`` does, in both directions."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        module._sync_gradients = reduces


def _handles(models: Iterable[nn.Module]) -> Iterator[Any]:
    """torch's records of flattened parameters."""
    for model in models:
        for module in FullyShardedDataParallel.fsdp_modules(model):
            if module._handle is not None:
                yield module._handle


def give_empty_gradients(models: Iterable[nn.Module]) -> None:
    """Give parameters of which this rank holds nothing a gradient of nothing, where other ranks have one.

    So every rank finds that an optimizer has gradients, or none does, and all take part in unscaling them.
    """
    for handle in _handles(models):
        flat = handle.flat_param
        if flat.grad is None:
            continue
        for parameter, info, none in zip(flat._params, flat._shard_param_infos, flat._is_grad_none_mask, strict=True):
            if not info.in_shard and not none and parameter.requires_grad and parameter.numel() == 0:
                parameter.grad = torch.zeros_like(parameter)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient: what is visible outside of forward and backward."""
    return tensor


def locate(models: Sequence[nn.Module]) -> Callable[[Tensor], Piece]:
    """A function from a parameter or buffer of these models to the piece this rank holds."""
    pieces: dict[int, Piece] = {}
    for handle in _handles(models):
        flat = handle.flat_param
        for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            first, count = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
            held = flat.detach()[first : first + count]
            pieces[id(parameter)] = Piece(held, info.intra_param_start_idx or 0, tuple(shape))
    return lambda tensor: pieces[id(tensor)] if id(tensor) in pieces else piece_of(tensor)


def refresh(models: Sequence[nn.Module]) -> None:
    """Free gathered parameters, which would not notice that the pieces change."""
    for handle in _handles(models):
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
            handle._free_unsharded_flat_param()
