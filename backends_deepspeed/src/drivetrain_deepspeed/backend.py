"""The backend, as hooks. What they do is in the modules beside this one, imported when a run needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.plugin import Capabilities, Check, hookimpl
from drivetrain_backends import TorchDistributedBackend
from drivetrain_deepspeed.config import DeepSpeedConfig
from drivetrain_deepspeed.migration import MIGRATION

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from drivetrain.bundle import Bundle
    from drivetrain.config import RunConfig
    from drivetrain.launch import LaunchPlan
    from drivetrain.plugin import Policy
    from drivetrain.world import Run, Topology, World
    from drivetrain_backends.sharded_checkpoints import Holding

__all__ = ["DeepSpeed"]

_NOTHING = contextlib.nullcontext()


class DeepSpeed(TorchDistributedBackend):
    """Cut optimizer state, gradients and parameters over ranks with DeepSpeed's ZeRO, stages 0 to 3."""

    api = (1, 0)
    Config = DeepSpeedConfig
    migration = MIGRATION
    requires = (*TorchDistributedBackend.requires, "deepspeed>=0.19.8,<0.20")

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._engines: Any = None
        """Those of this run; there from ``init_world`` on."""

    @property
    def capabilities(self) -> Capabilities:
        """From stage 1 on the engine computes in half precision itself, and scales losses; at stage 0 core does."""
        native = frozenset({"bfloat16", "float16"}) if self.config.stage > 0 else frozenset()
        return Capabilities(
            distributed_type="DEEPSPEED",
            many_processes=True,
            process_group=True,
            native_dtypes=native,
            owns_scaler=self.config.stage > 0,
            moves_model=True,
            shards_params=self.config.stage == 3,
            resharding=True,
        )

    def refuses(self, policy: Policy, device_type: str) -> str | None:
        """float16 where the engine has none. Below stage 1 it is core's autocast that computes."""
        from drivetrain_deepspeed import process

        return process.refused_dtype(policy.compute, device_type) if self.config.stage > 0 else None

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Whether torch can communicate, and the engine is there with what it needs."""
        from drivetrain_deepspeed import checks

        yield from super().checks()
        yield from checks.engine(cls.requires)

    # ---------------------------------------------------------------------------------------------------- the launcher

    @hookimpl
    def launch_environment(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Where compiled operations are kept, and the CPU where it is asked for; mistakes in the file end here."""
        from drivetrain_deepspeed import engine_config

        engine_config.check_launch(self.config.file, plan)
        wanted = {} if self.config.extensions_dir is None else {"TORCH_EXTENSIONS_DIR": self.config.extensions_dir}
        return {**wanted, **({"DS_ACCELERATOR": "cpu"} if plan.device == "cpu" else {})}

    # ----------------------------------------------------------------------------------------------------- the world

    @hookimpl
    def init_world(self, config: RunConfig, topology: Topology, device: torch.device, collectives: str | None) -> World:
        """A process group, which the engine shares."""
        from drivetrain_deepspeed import process
        from drivetrain_deepspeed.engines import Engines

        world = super().init_world(config, topology, device, collectives)
        process.enter(world, config.log_level)
        self._engines = Engines(self.config)
        return world

    @hookimpl
    def shutdown(self, run: Run, error: BaseException | None) -> None:
        """Take the engines' hooks off, then as every torch.distributed backend."""
        from drivetrain_deepspeed import process

        try:
            self._engines.close()
        finally:
            super().shutdown(run, error)
            process.leave()

    # ------------------------------------------------------------------------------------------------------- prepare

    @hookimpl
    def init_context(self, run: Run) -> contextlib.AbstractContextManager[Any]:
        """At stage 3, parameters are cut over ranks as soon as each is made; values are rank 0's."""
        if self.config.stage < 3 or not self.config.zero3_init:
            return _NOTHING
        from drivetrain_deepspeed import building

        return building.cutting(run, self.config)

    @hookimpl
    def prepare(
        self, run: Run, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[Sequence[nn.Module], Sequence[Optimizer]]:
        """An engine for each model that has an optimizer; at stage 3 for each model."""
        from drivetrain_deepspeed import preparing

        return preparing.prepare(run, self._engines, models, optimizers), optimizers

    @hookimpl
    def wrap_scheduler(self, run: Run, scheduler: Any, optimizers: Sequence[Any]) -> Any:
        """The file's schedule where a stand-in asks for it."""
        from drivetrain_deepspeed import stand_ins

        return stand_ins.scheduler(self.config.file, scheduler, optimizers)

    @hookimpl
    def after_prepare(self, run: Run, bundle: Bundle) -> None:
        """Compare the file with what was prepared, and tell the engines of the loaders' batch size."""
        from drivetrain_deepspeed import agreement

        agreement.check(run, self.config, bundle)
        agreement.tell_batch_size(self._engines, self.config, bundle)

    @hookimpl
    def unwrap(self, run: Run, model: nn.Module) -> nn.Module:
        """The user's module inside of an engine."""
        found: nn.Module = model.module if self._engines.is_engine(model) else model
        return found

    # ---------------------------------------------------------------------------------------------------------- hot

    @hookimpl
    def accumulate(self, run: Run, models: Sequence[nn.Module], last: bool) -> contextlib.AbstractContextManager[Any]:
        """Nothing to do: gradients are added up until they are clipped or applied."""
        return _NOTHING

    @hookimpl
    def sync_in_backward(self, run: Run, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Nothing to do, for the same reason."""
        return _NOTHING

    @hookimpl
    def backward(self, run: Run, loss: Tensor, models: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        """Compute gradients; it never steps."""
        self._engines.backward(loss, models, options)

    @hookimpl
    def scale_gradients(self, run: Run, optimizer: Optimizer, factor: float) -> None:
        """Multiply what each rank holds."""
        self._engines.scale(run, optimizer, factor)

    @hookimpl
    def clip_grad_norm(self, run: Run, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """By the norm over all ranks, of whole models or of any of their parameters, to the number given."""
        norm: Tensor = self._engines.clip_norm(run, parameters, max_norm, norm_type)
        return norm

    @hookimpl
    def clip_grad_value(self, run: Run, parameters: Sequence[nn.Parameter], clip_value: float) -> None:
        """Clamp what each rank holds."""
        self._engines.clip_value(run, parameters, clip_value)

    @hookimpl
    def step(self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Update a model; False where its gradients overflowed."""
        applied: bool = self._engines.step(run, optimizer, closure)
        return applied

    @hookimpl
    def zero_grad(self, run: Run, optimizer: Optimizer, set_to_none: bool) -> None:
        """Also what the engine holds of a group of micro-batches that is given up."""
        self._engines.zero_grad(optimizer, set_to_none)

    @hookimpl
    def release(self, run: Run, models: Sequence[nn.Module]) -> None:
        """Take the engines apart."""
        self._engines.release(models)

    # --------------------------------------------------------------------------------------------------------- state

    @hookimpl
    def save_state(self, run: Run, bundle: Bundle, directory: Path) -> None:
        """Each rank its pieces, of the master weights; at stage 0, where nothing is cut, in core's format."""
        from drivetrain import defaults
        from drivetrain_backends import sharded_checkpoints

        if self.config.stage == 0:
            defaults.save_state(run, bundle, directory)
        else:
            sharded_checkpoints.save(run, bundle, directory, self._holding(bundle))

    @hookimpl
    def load_state(self, run: Run, bundle: Bundle, directory: Path, strict: bool) -> None:
        """Whatever is there: pieces of any number of ranks and of any stage, or core's format of any backend."""
        from drivetrain import defaults
        from drivetrain_backends import sharded_checkpoints

        if sharded_checkpoints.in_pieces(bundle, directory):
            sharded_checkpoints.load(run, bundle, directory, strict, self._holding(bundle))
        else:
            defaults.load_state(run, bundle, directory, strict)
        self._engines.update_parameters(run)

    def _holding(self, bundle: Bundle) -> Holding:
        from drivetrain_deepspeed import state

        return state.holding(self._engines)

    @hookimpl
    def model_state(self, run: Run, model: nn.Module) -> dict[str, Tensor]:
        """Whole on rank 0, on the CPU, in the dtypes the user's module had; empty elsewhere."""
        from drivetrain_deepspeed import state

        return state.full(run, self._engines, model)

    @hookimpl
    def load_model_state(self, run: Run, model: nn.Module, state: Mapping[str, Tensor], strict: bool) -> None:
        """Each rank takes its pieces out of it."""
        from drivetrain_deepspeed import state as states

        states.fill(run, self._engines, model, state, strict)

    @hookimpl
    def optimizer_state(self, run: Run, optimizer: Optimizer) -> dict[str, Any]:
        """Whole on rank 0, on the CPU; without state elsewhere."""
        from drivetrain_deepspeed import state

        return state.full_optimizer(run, self._engines, optimizer)

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Each rank takes its pieces out of it."""
        from drivetrain_deepspeed import state as states

        states.load_optimizer(self._engines, optimizer, state)
