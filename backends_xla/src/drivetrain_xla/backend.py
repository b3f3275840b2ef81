"""The backend itself: one short method a hook."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.plugin import Backend, Capabilities, Check, Policy, hookimpl
from drivetrain_xla.config import RUNTIME, XlaConfig, planned_runtime
from drivetrain_xla.migration import MIGRATION

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from drivetrain.bundle import Bundle
    from drivetrain.config import RunConfig
    from drivetrain.launch import LaunchPlan
    from drivetrain.world import Run, Topology, World
    from drivetrain_xla.graphs import Graphs
    from drivetrain_xla.sharding import Sharding

__all__ = ["Xla"]

logger = logging.getLogger("drivetrain.xla")  # below core's, whose level and handler the user has set

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@functools.cache
def _defaults() -> Any:
    """Core's own answers; a module that imports torch, so not imported above."""
    from drivetrain import defaults

    return defaults


class Xla(Backend):
    """Compute with torch_xla: on one device, on many by SPMD (a mesh, FSDP, partitions), or in replicas."""

    api = (1, 0)
    Config = XlaConfig
    requires = ("torch_xla>=2.9", "torch>=2.9")
    migration = MIGRATION

    config: XlaConfig
    _graphs: Graphs
    _sharding: Sharding | None = None
    _last = True
    """Whether the current micro-batch is the last of its group."""

    @property
    def capabilities(self) -> Capabilities:
        """Several processes without SPMD, where the runtime can be several: that of the CPU is always one."""
        return Capabilities(
            distributed_type="XLA",
            many_processes=not self.config.spmd and planned_runtime(self.config) != "CPU",
            resharding=True,
        )

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """The pair of versions, the runtime and its devices, and torch_tpu."""
        from drivetrain_xla import checks

        return checks.engine()

    def refuses(self, policy: Policy, device_type: str) -> str | None:
        """XLA devices compute in float32 and bfloat16; what scales losses or swaps layers has no counterpart here."""
        if policy.loss_scale is not None or policy.compute == "float16":
            return "XLA devices have bfloat16, which needs no scaling of losses; use mixed_precision: bf16"
        if policy.converted is not None:
            return f"layers that compute in {policy.converted} have no kernels under XLA; use mixed_precision: bf16"
        return None

    # ------------------------------------------------------------------------------------------ the launcher's process

    @hookimpl
    def process_count(self, plan: LaunchPlan) -> int:
        """One: under SPMD it drives all devices, and without, several are asked for by number."""
        return 1

    @hookimpl
    def launch_environment(self, plan: LaunchPlan) -> Mapping[str, str]:
        """What the runtime reads when it starts; the pair of versions is checked before anything is started."""
        from drivetrain_xla.pairing import check_pair

        check_pair()
        variables = {RUNTIME: self.config.runtime}
        if self.config.cpu_devices is not None:
            variables["CPU_NUM_DEVICES"] = str(self.config.cpu_devices)
        return {name: value for name, value in variables.items() if value is not None}

    @hookimpl
    def launch(self, plan: LaunchPlan) -> int:
        """Several processes of a machine are started by torch_xla, which gives each its device."""
        from drivetrain.launch.elastic import start
        from drivetrain_xla import replicas

        if plan.processes_total == 1:
            return start(plan)
        if not self.capabilities.many_processes:
            why = "one process drives all devices of a machine under xla.spmd, and several machines are not supported"
            if not self.config.spmd:
                why = (
                    f"the runtime {planned_runtime(self.config)} is one process; xla.spmd: true divides it into devices"
                )
            raise ConfigError(
                f"backend xla: {plan.processes_total} processes are asked for, but {why}: num_processes: 1"
            )
        return replicas.launch(plan)

    # -------------------------------------------------------------------------------------------------------- the world

    @hookimpl
    def device(self, topology: Topology) -> torch.device:
        """Brings the runtime up. Under SPMD the device stands for all of them."""
        from drivetrain_xla import runtime
        from drivetrain_xla.graphs import Graphs

        runtime.start(self.config)
        self._graphs = Graphs(self.config.recompilation_limit)
        return runtime.current_device(topology)

    @hookimpl
    def compute_dtypes(self, device: torch.device) -> Collection[str]:
        """bfloat16, wherever the runtime is."""
        return frozenset({"bfloat16"})

    @hookimpl
    def collectives(self, device_type: str) -> str:
        """The engine's own; there is no process group."""
        return "xla"

    @hookimpl
    def init_world(self, config: RunConfig, topology: Topology) -> World:
        """The runtime's world, which must be the planned one, and under SPMD its mesh."""
        from drivetrain_xla import runtime

        runtime.check_device_setting(config)
        world, self._sharding = runtime.world(self.config, topology)
        return world

    @hookimpl
    def shutdown(self, run: Run, error: BaseException | None) -> None:
        """Says what was compiled. The runtime stays: it can't be taken down."""
        ended_well = error is None or isinstance(error, SystemExit)
        if ended_well and run.world.rank == 0:
            logger.info("xla: %s", self._graphs.summary())

    # ---------------------------------------------------------------------------------------------------------- prepare

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        """Cuts parameters as the mesh says; replicas begin with the weights of the first."""
        if run.world.size > 1 and self._sharding is None:
            from drivetrain_xla import replicas

            replicas.equalize(model)
        if self._sharding is None:
            return model
        self._graphs.cut()  # marks are for values, not for operations that have not run
        return self._sharding.shard(model)

    @hookimpl
    def after_prepare(self, run: Run, bundle: Bundle) -> None:
        """Refuses names in the section that fit nothing."""
        if self._sharding is not None and self._sharding.has_models:
            self._sharding.check_used(bundle.models)

    # -------------------------------------------------------------------------------------------------------------- hot

    @hookimpl
    def place(self, run: Run, batch: Any, non_blocking: bool) -> Any:
        """Ends the graph of the batch before, and sends this one on its way: neither is waited for."""
        self._graphs.cut()
        placed = _defaults().place(run, batch, non_blocking)
        self._graphs.saw(placed)
        if self._sharding is not None:
            self._sharding.mark_samples(placed, batch)
        return placed

    @hookimpl
    def accumulate(self, run: Run, models: Sequence[nn.Module], last: bool) -> Any:
        """Nothing to do but to remember it: gradients are reduced in the last backward."""
        return _NOTHING if last else self._unreduced()

    @contextlib.contextmanager
    def _unreduced(self) -> Iterator[None]:
        before, self._last = self._last, False
        try:
            yield
        finally:
            self._last = before

    @hookimpl
    def backward(self, run: Run, loss: Tensor, models: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
        """Gradients of replicas are averaged at the end of a group. The mean of means is one: it may run again."""
        loss.backward(**options)
        if self._last and run.world.size > 1 and self._sharding is None:
            from drivetrain_xla import replicas

            replicas.average_gradients(models)

    @hookimpl
    def step(self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """The optimizer's own step; what it keeps is cut as the parameters are."""
        applied = _defaults().step(run, optimizer, closure)
        if self._sharding is not None:
            self._sharding.cut_state(optimizer)
        return applied

    @hookimpl
    def after_step(self, run: Run, models: Sequence[nn.Module], applied: bool) -> None:
        """Ends the graph of a step."""
        self._graphs.cut()
        self._graphs.stepped()

    # ------------------------------------------------------------------------------------------------------ collectives

    @hookimpl
    def all_gather(self, run: Run, tensor: Tensor, group: Any) -> Tensor:
        """Stacked over replicas."""
        replicas = _replicas(run, group)
        return _defaults().all_gather(run, tensor, group) if replicas is None else replicas.all_gather(tensor)

    @hookimpl
    def all_reduce(self, run: Run, tensor: Tensor, op: str, group: Any) -> Tensor:
        """Reduced over replicas."""
        replicas = _replicas(run, group)
        return _defaults().all_reduce(run, tensor, op, group) if replicas is None else replicas.all_reduce(tensor, op)

    @hookimpl
    def broadcast(self, run: Run, tensor: Tensor, source: int, group: Any) -> Tensor:
        """One replica's on all."""
        replicas = _replicas(run, group)
        return tensor if replicas is None else replicas.broadcast(tensor, source)

    @hookimpl
    def broadcast_object(self, run: Run, value: Any, source: int, group: Any) -> Any:
        """One replica's on all."""
        replicas = _replicas(run, group)
        return value if replicas is None else replicas.all_gather_object(value)[source]

    @hookimpl
    def all_gather_object(self, run: Run, value: Any, group: Any) -> list[Any]:
        """In the replicas' order."""
        replicas = _replicas(run, group)
        return [value] if replicas is None else replicas.all_gather_object(value)

    @hookimpl
    def barrier(self, run: Run, group: Any) -> None:
        """Wait for all replicas."""
        replicas = _replicas(run, group)
        if replicas is not None:
            replicas.all_gather_object(None)

    # ------------------------------------------------------------------------------------------------------------ state

    @hookimpl
    def model_state(self, run: Run, model: nn.Module) -> dict[str, Tensor]:
        """Whole weights in host memory, so that files load without the engine."""
        from drivetrain_xla import sharding

        return sharding.to_host(model.state_dict())

    @hookimpl
    def load_model_state(self, run: Run, model: nn.Module, state: Mapping[str, Tensor], strict: bool) -> None:
        """Copies in place, and cuts again what is cut."""
        model.load_state_dict(state, strict=strict)
        if self._sharding is not None:
            self._sharding.renew(model)
        self._graphs.cut()

    @hookimpl
    def optimizer_state(self, run: Run, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Whole state in host memory."""
        from drivetrain_xla import sharding

        return sharding.to_host(optimizer.state_dict())

    @hookimpl
    def load_optimizer_state(self, run: Run, optimizer: Optimizer, models: Sequence[nn.Module], state: Any) -> None:
        """Loads it, and cuts again what is cut."""
        optimizer.load_state_dict(dict(state))
        if self._sharding is not None:
            self._sharding.cut_state(optimizer, anew=True)
        self._graphs.cut()

    @hookimpl
    def rng_state(self, run: Run) -> dict[str, Any]:
        """The number from which the engine derives every random operation of the next graph."""
        import torch_xla.core.xla_model as xm

        return {"seed": xm.get_rng_state()}

    @hookimpl
    def set_rng_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Go on from such a number."""
        import torch_xla.core.xla_model as xm

        if "seed" in state:
            xm.set_rng_state(int(state["seed"]))

    # -------------------------------------------------------------------------------------------------- device services

    @hookimpl
    def seed(self, run: Run, seed: int) -> None:
        """Seed the engine's generator."""
        import torch_xla

        torch_xla.manual_seed(seed)

    @hookimpl
    def synchronize(self, run: Run) -> None:
        """Compute what is recorded, and wait for it."""
        import torch_xla

        torch_xla.sync(wait=True)

    @hookimpl
    def empty_cache(self, run: Run) -> None:
        """Nothing to do: the engine keeps no cache it could give back."""

    @hookimpl
    def memory(self, run: Run) -> dict[str, int]:
        """What the runtime counts; the CPU's counts nothing."""
        from drivetrain_xla import runtime

        return runtime.memory(run.world.device)

    @hookimpl
    def bf16_supported(self, run: Run) -> bool:
        """Always, by float32 arithmetic where need be."""
        return True

    @hookimpl
    def compile_backend(self, run: Run) -> str:
        """The engine's own, for torch.compile."""
        return "openxla"

    @hookimpl
    def profiler_activities(self, run: Run) -> list[Any]:
        """What happens on the host; the devices have the engine's own profiler (torch_xla.debug.profiler)."""
        import torch

        return [torch.profiler.ProfilerActivity.CPU]

    @hookimpl
    def is_out_of_memory(self, run: Run, error: BaseException) -> bool:
        """The runtime's own words, besides torch's."""
        return "RESOURCE_EXHAUSTED" in str(error) or _defaults().is_out_of_memory(run, error)


def _replicas(run: Run, group: Any) -> Any:
    """Collectives of several processes; None for one, whose are core's."""
    if run.world.size == 1:
        return None
    if group is not None:
        raise DrivetrainError("backend xla has collectives of all processes only; leave group out")
    from drivetrain_xla import replicas

    return replicas
