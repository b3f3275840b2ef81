"""Models and batches on a mesh: marks for the compiler, which divides the work and moves what has to be moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.errors import ConfigError
from drivetrain.nested import leaves, map_tensors
from drivetrain_xla.mesh import Partitions, is_cut, mark

if TYPE_CHECKING:
    from drivetrain_xla.config import XlaConfig

__all__ = ["SAMPLES", "Sharding", "to_host"]

SAMPLES = ("data", "fsdp")
"""Axes among which the samples of a batch are divided."""


class Sharding:
    """What is cut in a run, and how.

    Args:
        config: The section.
        mesh: The engine's mesh.
        sizes: Devices along each axis.
    """

    def __init__(self, config: XlaConfig, mesh: Any, sizes: dict[str, int]) -> None:
        self.mesh = mesh
        self.shards = sizes["data"] * sizes["fsdp"]
        """Parts into which the samples are divided."""
        self.has_models = False
        """Whether any was cut; those for evaluation alone never are."""
        self._fsdp = sizes["fsdp"] > 1
        self._blocks = tuple(config.fsdp_blocks)
        self._blocks_missed = set(self._blocks)
        self._partitions = Partitions(config.partition, sizes)
        self._specs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._kept: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """For how many parameters an optimizer kept something when that was cut last."""

    def mark_samples(self, placed: Any, batch: Any = None) -> None:
        """Cut the first dimension of every tensor; one without dimensions is the same everywhere.

        Args:
            placed: What to mark.
            batch: The same before it was placed: what was on the device already is left as it is, since it may be the
                result of operations that have not run, where the engine takes no mark for data.
        """
        before = iter(leaves(batch))
        for leaf in leaves(placed):
            moved = batch is None or next(before) is not leaf
            if moved and isinstance(leaf, Tensor) and leaf.ndim:
                mark(leaf, self.mesh, (SAMPLES, *(None,) * (leaf.ndim - 1)))

    def shard(self, model: nn.Module) -> nn.Module:
        """Cut a model's parameters, in place. With an axis ``fsdp``, its outputs and those of its blocks are cut too.

        That is what torch_xla's SpmdFullyShardedDataParallel does. It is a wrapper, which would take core's forward
        (autocast, output dtype) from the model, and change the names of parameters; marks and hooks do neither.

        Raises:
            ConfigError: A pattern of ``partition`` does not fit the parameter that it matches.
        """
        self.has_models = True
        for _, parameter, spec in self._partitions.of(model):
            mark(parameter, self.mesh, spec)
            self._specs[parameter] = spec
        if self._fsdp:
            from torch_xla.distributed.spmd import xla_sharding

            for module in (*self._blocks_of(model), model):
                # Without it the compiler may gather the parameters of all blocks at once.
                xla_sharding.apply_backward_optimization_barrier(module)
                module.register_forward_hook(self._mark_output)
        return model

    def _blocks_of(self, model: nn.Module) -> Iterator[nn.Module]:
        names = self._blocks or tuple(getattr(model, "_no_split_modules", None) or ())
        for module in model.modules():
            if type(module).__name__ in names and module is not model:
                self._blocks_missed.discard(type(module).__name__)
                yield module

    def check_used(self, models: Sequence[nn.Module]) -> None:
        """Refuse names that fit nothing in any model prepared so far.

        Args:
            models: Those of the last ``prepare``, for the text.

        Raises:
            ConfigError: A pattern of ``partition`` matches no parameter, or a name in ``fsdp_blocks`` no module.
        """
        kinds = ", ".join(type(model).__name__ for model in models)
        if self._partitions.unmatched:
            example = next((name for model in models for name, _ in model.named_parameters()), "none")
            raise ConfigError(
                f"xla.partition: {', '.join(map(repr, sorted(self._partitions.unmatched)))} matches no parameter of "
                f"{kinds}; names are matched as a whole, such as {example!r}"
            )
        if self._blocks_missed:
            there = sorted({type(module).__name__ for model in models for module in model.modules()})
            raise ConfigError(
                f"xla.fsdp_blocks: {kinds} has no {', '.join(sorted(self._blocks_missed))}; it has {', '.join(there)}"
            )

    def _mark_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.mark_samples(output)

    def renew(self, model: nn.Module) -> None:
        """Mark parameters again: copying into one takes its mark away."""
        for parameter in model.parameters():
            spec = self._specs.get(parameter)
            if spec is not None and not is_cut(parameter):
                mark(parameter, self.mesh, spec)

    def cut_state(self, optimizer: Optimizer, *, anew: bool = False) -> None:
        """Cut what an optimizer keeps for a parameter as the parameter itself is.

        Args:
            optimizer: After a step, or a load.
            anew: Look at all of it. Else it is left where nothing was added, since updates in place keep marks.
        """
        if not anew and self._kept.get(optimizer) == len(optimizer.state):
            return
        self._kept[optimizer] = len(optimizer.state)
        for parameter, kept in optimizer.state.items():
            spec = self._specs.get(parameter)
            if spec is None:
                continue
            for value in kept.values():
                if _is_like(value, parameter) and not is_cut(value):
                    mark(value, self.mesh, spec)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.device == parameter.device


def to_host(data: Any) -> Any:
    """Nested data with every tensor whole and in host memory."""
    return map_tensors(lambda tensor: tensor.detach().cpu(), data)
