"""Compression of gradients on their way to the other ranks: torch's communication hooks by our names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigError
from drivetrain.world import Run
from drivetrain_ddp.config import DdpConfig

__all__ = ["register"]

_Hook = Callable[[Any, Any], Any]

_HOOKS: dict[str, _Hook] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
    "batched_powersgd": powerSGD_hook.batched_powerSGD_hook,
}
_SENT_IN: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_WRAPPERS: dict[str, Callable[[_Hook], _Hook]] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


def register(run: Run, replica: DistributedDataParallel, config: DdpConfig) -> None:
    """Give a replica the communication hook that the section names, or the one that the precision needs.

    Raises:
        ConfigError: The hook can't work in this run.
    """
    wanted = run.policy.reduce_dtype
    if config.comm_hook == "none":
        if wanted is not None and any(p.dtype != wanted for p in replica.parameters() if p.requires_grad):
            replica.register_comm_hook(None, _reduced_in(wanted))
        return
    if wanted is not None and _SENT_IN.get(config.comm_hook) != wanted:
        raise ConfigError(
            f"ddp.comm_hook: {config.comm_hook} and mixed_precision: {run.names['precision']}, which has gradients "
            f"reduced in {run.policy.reduce}, contradict each other; leave comm_hook out"
        )
    hook = _HOOKS[config.comm_hook]
    state = None
    if config.comm_hook.endswith("powersgd"):
        _check_powersgd(run, config)
        state = powerSGD_hook.PowerSGDState(None, **attrs.asdict(config.powersgd))
    if config.comm_wrapper != "none":
        hook = _WRAPPERS[config.comm_wrapper](hook)
    replica.register_comm_hook(state, _unnamed(hook))


def _reduced_in(dtype: torch.dtype) -> _Hook:
    """Gradients are averaged in another dtype than they have."""

    def communicate(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations, if there are any
        gradients = bucket.buffer()
        sent = gradients.to(dtype).div_(dist.get_world_size())
        received = dist.all_reduce(sent, async_op=True).get_future()
        return received.then(lambda done: gradients.copy_(done.value()[0]))

    return communicate


def _unnamed(hook: _Hook) -> _Hook:
    """The hook under another name: torch refuses bfloat16 hooks by name off two vendors, though others carry it too."""

    def communicate(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations, if there are any
        return hook(state, bucket)

    return communicate


def _check_powersgd(run: Run, config: DdpConfig) -> None:
    if run.policy.loss_scale is not None and (config.powersgd.use_error_feedback or config.powersgd.warm_start):
        raise ConfigError(
            f"ddp.comm_hook: {config.comm_hook} carries what it lost over to the next step, and with loss scaling "
            f"(mixed_precision: {run.names['precision']}) one overflow would stay in it for ever. Use bf16 or no mixed "
            f"precision, another comm_hook, or set use_error_feedback and warm_start of ddp.powersgd to false"
        )
    if config.comm_hook == "batched_powersgd" and not _orthogonalizes_matrices():
        raise ConfigError(
            f"ddp.comm_hook: batched_powersgd fails in torch {torch.__version__} at its first compressed step, number "
            f"{config.powersgd.start_powerSGD_iter}: it hands a matrix to a function that takes stacks of matrices. "
            f"Use powersgd"
        )


def _orthogonalizes_matrices() -> bool:
    """Whether this torch's batched hook can take its first step; torch 2.13's can't."""
    try:
        powerSGD_hook._orthogonalize(torch.eye(2, 1))
    except (AssertionError, IndexError):
        return False
    return True
