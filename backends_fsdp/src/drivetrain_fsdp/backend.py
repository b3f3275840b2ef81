"""The two backends, as hooks. What they do is in the modules beside this one, imported when a run needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from drivetrain.errors import ConfigError
from drivetrain.plugin import Capabilities, Check, hookimpl
from drivetrain_backends import TorchDistributedBackend
from drivetrain_fsdp.config import Fsdp1Config, FsdpConfig
from drivetrain_fsdp.migration import VERSION_1, VERSION_2

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from drivetrain.bundle import Bundle
    from drivetrain.config import RunConfig
    from drivetrain.world import Run, Topology, World

__all__ = ["Fsdp", "Fsdp1"]

_NOTHING = contextlib.nullcontext()


class _ShardingBackend(TorchDistributedBackend):
    """What both versions share. They differ in the module that talks to torch, their engine."""

    section: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset()
    least_ranks: ClassVar[int] = 1
    """Fewest ranks that each of several replicas can be cut over."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._ranks: int | None = None
        """Over how many a model is cut; None: not known yet."""
        self._sharding: Any = None
        """The models of this run; there from ``init_world`` on."""

    def _engine(self) -> Any:
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        """Any number of models and ranks; native only in a dtype that the section tells the engine to cast to."""
        policy = self.config.mixed_precision_policy
        native = None if policy is None else policy.param_dtype
        return Capabilities(
            distributed_type="FSDP",
            many_processes=True,
            one_process=False,  # one process has nothing to cut: core's defaults do the same for less
            native_dtypes=frozenset({native}) if native in ("bfloat16", "float16") else frozenset(),
            moves_model=True,  # unit by unit, so that no device ever holds the whole
            shards_params=self.config.cuts and self._ranks != 1,
            resharding=True,
            features=self.features,
        )

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Whether torch can communicate, and has this version's engine."""
        yield from super().checks()
        try:
            import torch.distributed.fsdp  # noqa: F401
        except ImportError as error:
            yield Check("torch.distributed.fsdp", False, str(error), "install torch's official wheel")
        else:
            yield Check("torch.distributed.fsdp", True)

    # ----------------------------------------------------------------------------------------------------- the world

    @hookimpl
    def init_world(self, config: RunConfig, topology: Topology, device: torch.device, collectives: str | None) -> World:
        """A process group, and the mesh over which models are cut. Sizes that can't be are refused before."""
        import torch.distributed as dist

        from drivetrain_fsdp import mesh, sharding

        size = dist.get_world_size() if dist.is_initialized() else topology.size
        shape = mesh.arrange(self.section, *self._sizes(topology), size, self.least_ranks)
        self._ranks = shape[1]
        world = super().init_world(config, topology, device, collectives)
        self._sharding = sharding.Sharding(self.section, self.config, self._engine())
        if world.collectives is None:
            return world
        return attrs.evolve(world, mesh=mesh.make_mesh(device.type, *shape))

    def _sizes(self, topology: Topology) -> tuple[int | None, int | None]:
        """Replicas of the model, and ranks that each is cut over, as far as they were said."""
        return self.config.replicate_size, self.config.shard_size

    # ------------------------------------------------------------------------------------------------------- prepare

    @hookimpl
    def init_context(self, run: Run) -> contextlib.AbstractContextManager[Any]:
        """With ``cpu_ram_efficient_loading``, models have values on rank 0 alone until they are prepared."""
        from drivetrain_fsdp import values

        return values.building(run, self.config.cpu_ram_efficient_loading)

    @hookimpl
    def move_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Only called for models that stay whole: the others are moved while they are cut."""
        from drivetrain_fsdp import values

        values.check_values(run, model, self.config.sync_module_states)
        values.bring(run, model.modules(), self.config.sync_module_states)
        return model

    @hookimpl
    def prepare(self, run: Run, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Refuse what would fail late; the rest is for ``wrap_model`` and ``wrap_optimizer``."""
        self._sharding.refuse(run, models)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Cut it over the ranks, starting from rank 0's values."""
        made: nn.Module = self._sharding.shard(run, model)
        return made

    @hookimpl
    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Cut the state it has already."""
        from drivetrain_fsdp import optimizer_state

        if optimizer.state:
            locate = self._sharding.locate()
            for parameter, entries in optimizer.state.items():
                entries.update({key: optimizer_state.cut(parameter, value, locate) for key, value in entries.items()})
        return optimizer

    @hookimpl
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's module. Its parameters are cut all the same."""
        found: nn.Module = self._sharding.engine.unwrap(model)
        return found

    # ---------------------------------------------------------------------------------------------------------- hot

    @hookimpl
    def accumulate(self, run: Run, models: Sequence[nn.Module], last: bool) -> contextlib.AbstractContextManager[Any]:
        """Leave gradients unreduced until the last micro-batch of the group. They are whole until then."""
        found: contextlib.AbstractContextManager[Any] = _NOTHING if last else self._sharding.switched(models, False)
        return found

    @hookimpl
    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Reduce in the next backward what was left unreduced."""
        found: contextlib.AbstractContextManager[Any] = self._sharding.switched([model], True)
        return found

    @hookimpl
    def clip_grad_norm(self, run: Run, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """By the norm over all ranks, of whole models or of any of their parameters."""
        norm: Tensor = self._sharding.clip_norm(run, parameters, max_norm, norm_type)
        return norm

    @hookimpl
    def clip_grad_value(self, run: Run, parameters: Sequence[nn.Parameter], clip_value: float) -> None:
        """Clamp what each rank holds."""
        self._sharding.clip_value(parameters, clip_value)

    @hookimpl
    def make_scaler(self, run: Run) -> Any:
        """A scaler by which an overflow on one rank skips the update on all."""
        from drivetrain_backends.scaler import ShardedGradScaler

        return ShardedGradScaler(run, **run.policy.scaler_arguments)

    # --------------------------------------------------------------------------------------------------------- state

    @hookimpl
    def save_state(self, run: Run, bundle: Bundle, directory: Path) -> None:
        """Each rank its pieces; or, with ``state_dict_type: full``, rank 0 all of it in core's format."""
        from drivetrain import defaults
        from drivetrain_backends import sharded_checkpoints
        from drivetrain_fsdp import optimizer_state

        self._sharding.settle(run, bundle)
        if self.config.state_dict_type == "full":
            defaults.save_state(run, bundle, directory)
        else:
            sharded_checkpoints.save(run, bundle, directory, optimizer_state.holding(self._sharding.locate()))

    @hookimpl
    def load_state(self, run: Run, bundle: Bundle, directory: Path, strict: bool) -> None:
        """Whatever is there: pieces of any number of ranks, of either version, or core's format of any backend."""
        from drivetrain import defaults
        from drivetrain_backends import sharded_checkpoints
        from drivetrain_fsdp import optimizer_state

        self._sharding.settle(run, bundle)
        if sharded_checkpoints.in_pieces(bundle, directory):
            holding = optimizer_state.holding(self._sharding.locate())
            sharded_checkpoints.load(run, bundle, directory, strict, holding)
        else:
            defaults.load_state(run, bundle, directory, strict)

    @hookimpl
    def model_state(self, run: Run, model: nn.Module) -> dict[str, Tensor]:
        """Whole on rank 0, on the CPU; empty elsewhere."""
        from drivetrain_backends import model_state

        return model_state.full(run, self.unwrap(model), self._sharding.locate(), self._group(run))

    @hookimpl
    def load_model_state(self, run: Run, model: nn.Module, state: Mapping[str, Tensor], strict: bool) -> None:
        """Each rank takes its pieces out of it."""
        from drivetrain_backends import model_state

        model_state.fill(self.unwrap(model), self._sharding.locate(), state, strict)

    @hookimpl
    def optimizer_state(self, run: Run, optimizer: Optimizer) -> dict[str, Any]:
        """Whole on rank 0, on the CPU; without state elsewhere."""
        from drivetrain_fsdp import optimizer_state

        return optimizer_state.full(run, optimizer, self._sharding.locate(), self._group(run))

    @hookimpl
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Each rank takes its pieces out of it."""
        from drivetrain_fsdp import optimizer_state

        optimizer_state.load(optimizer, self._sharding.locate(), state)

    def _group(self, run: Run) -> Any:
        from drivetrain_fsdp import mesh

        return None if run.world.mesh is None else mesh.shard_group(run.world.mesh)


class Fsdp(_ShardingBackend):
    """Cut parameters, gradients and optimizer state over ranks with torch's ``fully_shard``."""

    api = (1, 0)
    Config = FsdpConfig
    migration = VERSION_2
    section = "fsdp"
    features = frozenset({"all_gather_extensions"})

    def _engine(self) -> Any:
        from drivetrain_fsdp import fsdp2

        return fsdp2

    @hookimpl
    def zero_grad(self, run: Run, optimizer: Optimizer, set_to_none: bool) -> None:
        """Also what was added up in a group that is given up, before it was reduced into any ``.grad``."""
        optimizer.zero_grad(set_to_none=set_to_none)
        if self._sharding.accumulated:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._sharding.engine.discard_unreduced(self._sharding.models, parameters)


class Fsdp1(_ShardingBackend):
    """Cut parameters, gradients and optimizer state over ranks with torch's ``FullyShardedDataParallel``."""

    api = (1, 0)
    Config = Fsdp1Config
    migration = VERSION_1
    section = "fsdp1"
    least_ranks = 2  # where there is nothing to cut, torch averages gradients within the group of one, and nowhere else

    def _engine(self) -> Any:
        from drivetrain_fsdp import fsdp1

        return fsdp1

    def _sizes(self, topology: Topology) -> tuple[int | None, int | None]:
        replicate, shard = super()._sizes(topology)
        if not self.config.strategy.startswith("hybrid") or (replicate, shard) != (None, None):
            return replicate, shard
        if topology.local_size in (1, topology.size):
            raise ConfigError(
                f"fsdp1.sharding_strategy: {self.config.strategy} cuts a model over the ranks of each machine, and "
                f"here {topology.size} rank(s) run {topology.local_size} to a machine; set fsdp1.replicate_size"
            )
        return None, topology.local_size

    @hookimpl
    def backward(self, run: Run, loss: Tensor, models: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        """Plain; with loss scaling, parameters of which this rank holds nothing get empty gradients."""
        loss.backward(**options)
        if run.policy.loss_scale is not None:
            self._sharding.engine.give_empty_gradients(self._sharding.reducing)
