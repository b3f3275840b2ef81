"""The order of ``prepare``. Core owns it: plugins fill in steps, and never restore ties or optimizers themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from drivetrain.bundle import Bundle
from drivetrain.errors import DrivetrainError
from drivetrain.forward import AutocastForward
from drivetrain.optimizer import AcceleratedOptimizer
from drivetrain.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.world import Run

__all__ = ["prepare"]

logger = logging.getLogger(__name__)

_KINDS: Mapping[str, type] = {
    "models": nn.Module,
    "optimizers": Optimizer,
    "loaders": DataLoader,
    "schedulers": LRScheduler,
}


def prepare(
    accelerator: Accelerator, objects: Sequence[Any], placed: Sequence[bool], evaluation: bool = False
) -> list[Any]:
    """Prepare everything in ``objects`` that can be, in one go; returns as many objects in the same order.

    Args:
        accelerator: Keeps what was prepared.
        objects: Models, optimizers, loaders and schedulers; anything else is returned as it is.
        placed: For each object whether it is moved (a model) or places its batches (a loader).
        evaluation: Leave out the distributing of models, since they will not be trained.
    """
    known = accelerator.known
    results = [known.find(thing) for thing in objects]
    bundle, positions = _sort(objects, results)
    bundle.gradient_accumulation_steps = accelerator.gate.steps
    sources = {kind: list(getattr(bundle, kind)) for kind in _KINDS}
    bundle.record()
    _check_optimizers(accelerator, bundle)
    _prepare_models(accelerator, bundle, [placed[i] for i in positions["models"]], evaluation)
    _wire_optimizers(accelerator, bundle)
    bundle.loaders = [
        _prepare_loader(accelerator, loader, placed[position])
        for loader, position in zip(bundle.loaders, positions["loaders"], strict=True)
    ]
    _wire_schedulers(accelerator, bundle)
    accelerator.run.hooks.after_prepare(run=accelerator.run, bundle=bundle)
    for kind in ("optimizers", "loaders", "schedulers"):
        known.keep(kind, sources[kind], getattr(bundle, kind))
    for kind, indices in positions.items():
        for made, position in zip(getattr(bundle, kind), indices, strict=True):
            results[position] = made
    return [thing if made is None else made for thing, made in zip(objects, results, strict=True)]


def _sort(objects: Sequence[Any], ready: Sequence[Any]) -> tuple[Bundle, dict[str, list[int]]]:
    """What is still to be prepared, by kind, and the positions it came from."""
    bundle = Bundle()
    positions: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    for position, thing in enumerate(objects):
        kind = _kind(thing)
        if kind is None:
            _check_inside(thing, position)
        if kind is None or ready[position] is not None:
            continue
        found = getattr(bundle, kind)
        if any(thing is other for other in found):
            raise ValueError(f"prepare got the same {type(thing).__name__} twice, again as argument {position}")
        found.append(thing)
        positions[kind].append(position)
    return bundle, positions


def _check_inside(thing: Any, position: int) -> None:
    """Refuse what would be returned as it is, and train unprepared: a container of things to prepare, or a class."""
    if isinstance(thing, type) and issubclass(thing, tuple(_KINDS.values())):
        raise TypeError(
            f"argument {position} of prepare is the class {thing.__name__}, not an object of it: call it first, "
            f"{thing.__name__}(...)"
        )
    inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    found = next((one for one in inside if isinstance(one, tuple(_KINDS.values()))), None)
    if found is not None:
        raise TypeError(
            f"argument {position} of prepare is a {type(thing).__name__} with a {type(found).__name__} in it, and only "
            f"objects that are arguments themselves are prepared: prepare(*objects)"
        )


def _kind(thing: Any) -> str | None:
    """What an object is to be prepared as; None: not at all. A scheduler needs no base class."""
    for kind, cls in _KINDS.items():
        if isinstance(thing, cls):
            return kind
    if isinstance(getattr(thing, "optimizer", None), Optimizer) and all(
        callable(getattr(thing, name, None)) for name in ("step", "state_dict", "load_state_dict")
    ):
        return "schedulers"
    if hasattr(thing, "param_groups") and callable(getattr(thing, "step", None)):
        logger.warning(
            "prepare returns this %s as it is: it is no torch.optim.Optimizer, so neither gradient accumulation nor "
            "loss scaling hold back its step",
            type(thing).__name__,
        )
    return None


# ----------------------------------------------------------------------------------------------------------- models


def _prepare_models(accelerator: Accelerator, bundle: Bundle, placed: Sequence[bool], evaluation: bool) -> None:
    if not bundle.models and not bundle.optimizers:
        return
    run, hooks = accelerator.run, accelerator.run.hooks
    originals, before = list(bundle.models), bundle.parameters()
    bundle.kinds = [type(model).__name__ for model in originals]
    _check_models(accelerator, bundle.models)

    bundle.models = [hooks.convert_model(run=run, model=model) for model in bundle.models]
    _rewire(bundle)
    if evaluation or not run.capabilities.moves_model:  # what is not distributed is moved by no engine
        bundle.models = [
            hooks.move_model(run=run, model=model) if place else model
            for model, place in zip(bundle.models, placed, strict=True)
        ]
        _rewire(bundle)

    if _needs_autocast(run, evaluation):
        for model in bundle.models:
            AutocastForward.install(model, accelerator.autocast_of, run.policy.output_dtype)
    if run.config.compile is not None:
        options = {key: value for key, value in attrs.asdict(run.config.compile).items() if value is not None}
        options.setdefault("backend", hooks.compile_backend(run=run))
        for model in bundle.models:
            hooks.compile_model(run=run, model=model, options=options)

    if not evaluation:
        _distribute(run, bundle)
    after = Bundle(models=[hooks.unwrap(run=run, model=model) for model in bundle.models]).parameters()
    accelerator.known.note_replaced({old: after[name] for name, old in before.items() if name in after})
    accelerator.known.keep_models(originals, bundle)
    accelerator.gate.renew()


def _needs_autocast(run: Run, evaluation: bool) -> bool:
    """Whether forward runs under the hook ``autocast``: not where the backend computes in that dtype by itself.

    A precision that brings a context of its own needs it in any case, and so does a model that is not distributed,
    which never meets the backend.
    """
    if run.policy.compute is None:
        return False
    owner = run.hooks.owner("autocast")
    own = owner is not None and owner.role == "precision"
    return own or evaluation or run.policy.compute not in run.capabilities.native_dtypes


def _rewire(bundle: Bundle) -> None:
    bundle.retie()
    bundle.repoint()


def _distribute(run: Run, bundle: Bundle) -> None:
    """Hand models and optimizers to the backend: together if it wants them so, else one by one."""
    hooks = run.hooks
    joint = hooks.prepare(run=run, models=bundle.models, optimizers=bundle.optimizers)
    if joint is not None:
        bundle.models, bundle.optimizers = list(joint[0]), list(joint[1])
        return
    bundle.models = [hooks.wrap_model(run=run, model=model) for model in bundle.models]
    bundle.repoint(lambda model: hooks.unwrap(run=run, model=model))
    bundle.optimizers = [
        hooks.wrap_optimizer(run=run, optimizer=optimizer, models=bundle.models_of(index))
        for index, optimizer in enumerate(bundle.optimizers)
    ]


def _check_models(accelerator: Accelerator, models: Sequence[nn.Module]) -> None:
    """Refuse at once what would fail late and deep in an engine."""
    run = accelerator.run
    limit = run.capabilities.max_models
    count = len(accelerator.known.models) + len(models)
    if limit is not None and count > limit:
        raise DrivetrainError(f"backend {run.names['backend']!r} can prepare {limit} model(s) in a run, not {count}")
    if run.policy.loss_scale is None:
        return
    for model in models:
        halves = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
        if halves:
            more = f" and {len(halves) - 3} more" if len(halves) > 3 else ""
            raise DrivetrainError(
                f"{type(model).__name__} has float16 parameters ({', '.join(halves[:3])}{more}), whose gradients can't "
                f"be unscaled; keep the weights in fp32 (model.float()) and let mixed_precision choose the dtype"
            )


# ------------------------------------------------------------------------------------------------------- optimizers


def _check_optimizers(accelerator: Accelerator, bundle: Bundle) -> None:
    """Follow parameters of models prepared earlier; refuse those of no model, which no backend could keep equal."""
    known = accelerator.known
    for index, optimizer in enumerate(bundle.optimizers):
        _follow(optimizer, known.replacement)
        if accelerator.run.world.data_size == 1:
            continue
        owned = known.owned()
        strangers = [parameter for parameter in bundle.strangers(index) if id(parameter) not in owned]
        if strangers:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strangers[:3])
            raise DrivetrainError(
                f"{type(optimizer).__name__} holds {len(strangers)} parameter(s) of no prepared model ({shapes}). "
                f"They would train differently on each rank; pass their model to prepare before it or in the same call"
            )


def _follow(optimizer: Optimizer, replacement: Callable[[Any], Any]) -> None:
    """Point an optimizer, and the state it has, at what is trained in place of its parameters."""
    for group in optimizer.param_groups:
        for position, old in enumerate(group["params"]):
            new = replacement(old)
            if new is not old:
                group["params"][position] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def _wire_optimizers(accelerator: Accelerator, bundle: Bundle) -> None:
    for index, optimizer in enumerate(bundle.optimizers):
        models = bundle.models_of(index) or accelerator.known.models_with(optimizer)
        bundle.optimizers[index] = AcceleratedOptimizer(optimizer, accelerator.gradients, models)


def _wire_schedulers(accelerator: Accelerator, bundle: Bundle) -> None:
    run = accelerator.run
    optimizers: list[Any] = [*bundle.optimizers, *accelerator.known.optimizers]
    for index, scheduler in enumerate(bundle.schedulers):
        inner = scheduler.optimizer
        own = [one for one in optimizers if inner is one or inner is one.optimizer]
        # An engine may have replaced the optimizer the scheduler knows, or it is still to be prepared; then the
        # scheduler moves with all there are, those to come included.
        followed = own[:1] or accelerator.known.optimizers
        wrapped = run.hooks.wrap_scheduler(run=run, scheduler=scheduler, optimizers=own[:1] or optimizers)
        counts_updates = getattr(wrapped, "counts", None) == "updates"
        multiplier = 1 if counts_updates else accelerator.scheduler_multiplier()
        bundle.schedulers[index] = AcceleratedScheduler(
            wrapped, followed, multiplier, accelerator.step_scheduler_with_optimizer
        )
    _mention_multiplier(accelerator, bundle.schedulers)


def _mention_multiplier(accelerator: Accelerator, schedulers: Sequence[AcceleratedScheduler]) -> None:
    """Say it with the first schedulers: people who wrote a schedule in updates are surprised otherwise."""
    several = max((one.multiplier for one in schedulers if one.with_optimizer), default=1)
    if several > 1 and accelerator.is_main_process and not accelerator.known.schedulers:
        logger.info(
            "one update moves a scheduler by %d steps, one for each data-parallel shard, as a schedule written in "
            "batches of the unprepared loader needs; Accelerator(scheduler_counts='updates') moves it by one",
            several,
        )


# ---------------------------------------------------------------------------------------------------------- loaders


def _prepare_loader(accelerator: Accelerator, loader: Any, placed: bool) -> Any:
    from drivetrain.data.preparing import prepare_loader

    run = accelerator.run
    made = prepare_loader(
        loader,
        data_rank=run.world.data_rank,
        data_size=run.world.data_size,
        feeds=run.world.feeds,
        place=accelerator.place if placed else None,
        configuration=accelerator.dataloader_config,
        gate=accelerator.gate,
        base_seed=_draw_seed(run),
        collectives=LoaderCollectives(run),
    )
    _warn_of_nothing(loader, made)
    return run.hooks.wrap_loader(run=run, loader=made)


def _warn_of_nothing(source: Any, made: Any) -> None:
    """An epoch in which no rank gets a batch is rarely meant."""
    try:
        nothing = len(made) == 0 < len(source)
    except TypeError:  # a stream
        return
    if nothing:
        logger.warning(
            "a prepared loader has no batches: drop_last drops a round in which not every rank has a full batch, and "
            "the %d batch(es) of this loader do not fill one; use smaller batches or drop_last=False",
            len(source),
        )


def _draw_seed(run: Run) -> int:
    """Where the order of a loader's samples starts from: drawn on rank 0, so that seeding decides it, and shared."""
    drawn = torch.randint(0, 2**31, (1,), dtype=torch.int64)
    return int(run.hooks.broadcast(run=run, tensor=drawn.to(run.world.device), source=0, group=None))


@attrs.frozen(eq=False)
class LoaderCollectives:
    """What a loader that reads for other ranks needs of the run."""

    run: Run

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.run.world.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.run.world.size

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return self.run.world.device

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's tensor, on every rank."""
        return self.run.hooks.broadcast(run=self.run, tensor=tensor, source=source, group=None)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The source rank's object, on every rank."""
        return self.run.hooks.broadcast_object(run=self.run, value=value, source=source, group=None)
