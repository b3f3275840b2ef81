"""From models and optimizers to engines."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.world import Run
from drivetrain_backends.replicas import check_same_model, copy_from_first_rank
from drivetrain_deepspeed import casting, engine_config, optimizer_state, partitions, process, stand_ins
from drivetrain_deepspeed.config import DeepSpeedConfig
from drivetrain_deepspeed.engines import Engines
from drivetrain_deepspeed.optimizers import Trained, inner_optimizer, takes_engines_own
from drivetrain_deepspeed.originals import Originals

__all__ = ["prepare"]

logger = logging.getLogger(__name__)


def prepare(
    run: Run, engines: Engines, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[nn.Module]:
    """Make an engine of every model that has an optimizer, and of every model at stage 3.

    Returns:
        The models, in the same order. Optimizers stay what they are.

    Raises:
        DrivetrainError: Models and optimizers do not go together one by one.
    """
    pairs = _pairs(models, optimizers)
    for model in models:
        check_same_model(run, model)
    return [_prepare_one(run, engines, model, optimizer) for model, optimizer in zip(models, pairs, strict=True)]


def _pairs(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer | None]:
    """The optimizer of each model."""
    owner: dict[int, int] = {}
    for number, model in enumerate(models):
        for parameter in model.parameters():
            if owner.setdefault(id(parameter), number) != number:
                raise DrivetrainError(
                    f"models {owner[id(parameter)]} and {number} of this prepare call share a parameter of shape "
                    f"{tuple(parameter.shape)}, which two engines can't both train; put both into one module"
                )
    pairs: list[Optimizer | None] = [None] * len(models)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        held = [owner.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
        found = sorted({number for number in held if number is not None})
        if not found or None in held:
            raise DrivetrainError(
                f"{name} holds parameters of no model of this prepare call, but the engine makes one thing of a model "
                f"and its optimizer; pass both to prepare in one call"
            )
        if len(found) > 1:
            raise DrivetrainError(
                f"{name} holds parameters of {len(found)} models, but an engine has one model and one optimizer; make "
                f"an optimizer for each, or put the models into one module"
            )
        if pairs[found[0]] is not None:
            raise DrivetrainError(
                f"{type(models[found[0]]).__name__} has two optimizers, but an engine takes one; make one optimizer "
                f"with a parameter group for each"
            )
        pairs[found[0]] = optimizer
    return pairs


def _prepare_one(run: Run, engines: Engines, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
    config = engines.config
    if optimizer is None and config.stage < 3:
        return _keep_whole(run, config, model)
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    engine, trained = _make_engine(run, config, model, optimizer, dtypes)
    _equal_buffers(run, engine.module)
    for mode in ("train", "eval"):
        setattr(engine, mode, functools.partial(_and_itself, engine, getattr(engine, mode)))
    engines.add(engine, trained)
    if config.stage == 3:
        for parameter in engine.module.parameters():
            parameter.to_local = _Local(parameter)
    compute = run.policy.compute_dtype
    if config.stage > 0 and compute is not None and not engine.torch_autocast_enabled():
        casting.install(engine.module, compute, run.policy.output_dtype)
    made: nn.Module = engine
    return made


def _and_itself(engine: nn.Module, change: Callable[..., None], *args: Any, **kwargs: Any) -> nn.Module:
    """What torch's modules answer when their mode is changed, and the engine does not."""
    change(*args, **kwargs)
    return engine


@torch.no_grad()  # type: ignore[untyped-decorator]
def _equal_buffers(run: Run, module: nn.Module) -> None:
    """Give every rank the buffers of rank 0; parameters alone are the engine's affair."""
    for buffer in module.buffers():
        buffer.copy_(run.hooks.broadcast(run=run, tensor=buffer, source=0, group=None))


@attrs.frozen
class _Local:
    """``parameter.to_local()``: the part of it that this rank holds, as torch's sharded tensors have it."""

    parameter: Any

    def __call__(self) -> torch.Tensor:
        return partitions.held(self.parameter).local


def _keep_whole(run: Run, config: DeepSpeedConfig, model: nn.Module) -> nn.Module:
    """A model that is not trained, below stage 3: moved, made equal, and cast like the others."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        logger.warning(
            "%s was prepared without an optimizer: it can be evaluated, and gradients flow through it, but it is not "
            "trained. Pass its optimizer to the same prepare call if it is to be",
            type(model).__name__,
        )
    model = run.hooks.move_model(run=run, model=model)
    copy_from_first_rank(run, model)
    compute = run.policy.compute_dtype
    if config.stage > 0 and compute is not None:
        model.to(compute)
        casting.install(model, compute, run.policy.output_dtype)
    return model


def _make_engine(
    run: Run,
    config: DeepSpeedConfig,
    model: nn.Module,
    optimizer: Optimizer | None,
    dtypes: dict[str, torch.dtype],
) -> tuple[Any, Trained | None]:
    import deepspeed

    section = None if optimizer is None else stand_ins.optimizer_section(config.file, optimizer)
    settings = engine_config.build(config, run.policy, model, trains=optimizer is not None, optimizer=section)
    arguments: dict[str, Any] = {}
    inner: Optimizer | None = None
    if section is not None:
        assert optimizer is not None
        groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
        arguments["model_parameters"] = groups
    elif optimizer is not None:
        inner = _inner(config, optimizer, settings)
        arguments["optimizer"] = inner
    parameters = frozenset(map(id, model.parameters()))
    rounded = run.policy.compute_dtype if config.stage > 0 and optimizer is not None else None
    originals = Originals.of(model, rounded)
    with process.told_local_rank(run):
        engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False, **arguments)
    if optimizer is None:
        return engine, None
    pairs = [] if inner is optimizer else _group_pairs(optimizer, engine)
    trained = Trained(optimizer, pairs, len(optimizer.param_groups), parameters, dtypes)
    if not engine.torch_autocast_enabled():
        trained.frozen = originals.hand_over(run, engine.optimizer)
    if section is not None:
        trained.take_over()
    if optimizer.state and pairs:
        optimizer_state.take_over(engine.optimizer, optimizer)
    if pairs:
        optimizer.register_state_dict_pre_hook(_refuse_state)
        optimizer.register_load_state_dict_pre_hook(_refuse_state)
    return engine, trained


def _inner(config: DeepSpeedConfig, optimizer: Optimizer, settings: dict[str, Any]) -> Optimizer:
    if config.stage == 0:
        return optimizer
    if isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1:
        raise DrivetrainError(
            "the engine merges the parameter groups of Adagrad into one; use one group, or another optimizer"
        )
    offloaded = config.offload_device("offload_optimizer") is not None
    engines_own = offloaded and settings.get("zero_force_ds_cpu_optimizer", True) and takes_engines_own(optimizer)
    if offloaded and not engines_own:
        settings["zero_force_ds_cpu_optimizer"] = False
    return inner_optimizer(optimizer, offloaded=engines_own)


def _group_pairs(optimizer: Optimizer, engine: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Groups of the user's optimizer and of the engine's; the engine leaves out empty ones."""
    basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
    own = [group for group in optimizer.param_groups if group["params"]]
    if len(own) != len(basic.param_groups):
        raise ConfigError(
            f"the engine made {len(basic.param_groups)} parameter groups of the {len(own)} that "
            f"{type(optimizer).__name__} has"
        )
    return list(zip(own, basic.param_groups, strict=True))


def _refuse_state(optimizer: Optimizer, state: Any = None) -> None:
    raise DrivetrainError(
        f"the state of this {type(optimizer).__name__} is cut over ranks by the engine; save and load it with "
        f"accelerator.save_state() and load_state()"
    )
