"""State of models and optimizers that engines train: in the master weights' precision, by the user's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError
from drivetrain.world import Run
from drivetrain_backends import model_state
from drivetrain_backends.pieces import Piece
from drivetrain_backends.sharded_checkpoints import Holding
from drivetrain_deepspeed import optimizer_state, partitions
from drivetrain_deepspeed.engines import Engines

__all__ = ["fill", "full", "full_optimizer", "holding", "load_optimizer"]


def holding(engines: Engines) -> Holding:
    """What the ranks hold, for checkpoints in pieces.

    Raises:
        CheckpointError: Some of it is on NVMe.
    """
    _check_reachable(engines)
    owners, frozen = engines.owners(), engines.frozen()

    def locate(tensor: Tensor) -> Piece:
        if id(tensor) in frozen:
            return frozen[id(tensor)].piece
        zero = owners.get(id(tensor))
        return partitions.held(tensor) if zero is None else partitions.locate(zero, tensor)

    def split(run: Run, optimizer: Optimizer, labels: Sequence[str]) -> tuple[dict[str, Any], dict[str, Piece]]:
        return optimizer_state.split(run, engines.engine_of(optimizer).optimizer, optimizer, labels)

    def read(optimizer: Optimizer, state: dict[str, Any], files: Any) -> None:
        if engines.config.stage == 0:
            load_optimizer(engines, optimizer, optimizer_state.whole(state, files))
            return
        optimizer_state.read(engines.engine_of(optimizer).optimizer, optimizer, state, files)

    return Holding(locate, split, read)


def _check_reachable(engines: Engines) -> None:
    for name in ("offload_optimizer", "offload_param"):
        if engines.config.offload_device(name) == "nvme":
            raise CheckpointError(
                f"{name} keeps state on NVMe, where only the engine reads and writes it; save it with the engine's own "
                f"model.save_checkpoint(directory) and load_checkpoint, or offload to cpu"
            )


def full(run: Run, engines: Engines, model: nn.Module) -> dict[str, Any]:
    """The whole state dict, on the CPU of rank 0; empty on other ranks. Every rank calls it."""
    module = run.hooks.unwrap(run=run, model=model)
    found = model_state.full(run, module, holding(engines).locate, None)
    dtypes = engines.dtypes(model)
    return {
        name: value.to(dtypes[name]) if isinstance(value, Tensor) and name in dtypes else value
        for name, value in found.items()
    }


def fill(run: Run, engines: Engines, model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Put a whole state dict into a model of which this rank holds pieces. Every rank calls it.

    Raises:
        CheckpointError: It does not fit. Nothing was changed then.
    """
    module = model.module if engines.is_engine(model) else model
    model_state.fill(module, holding(engines).locate, state, strict)
    engines.update_parameters(run)


def full_optimizer(run: Run, engines: Engines, optimizer: Optimizer) -> dict[str, Any]:
    """The whole state dict on rank 0, on the CPU; without state on other ranks. Every rank calls it."""
    zero = engines.engine_of(optimizer).optimizer
    if engines.config.stage == 0:
        whole: dict[str, Any] = zero.state_dict()
        return whole
    return optimizer_state.full(run, zero, optimizer)


def load_optimizer(engines: Engines, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole state dict, of which this rank's parts are kept."""
    zero = engines.engine_of(optimizer).optimizer
    if engines.config.stage > 0:
        optimizer_state.load(zero, optimizer, state)
        return
    zero.load_state_dict(dict(state))
    if zero is not optimizer:
        for group, loaded in zip(optimizer.param_groups, zero.param_groups, strict=True):
            group.update((key, value) for key, value in loaded.items() if key != "params")
