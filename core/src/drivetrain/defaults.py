"""What core does for a hook that no plugin implements: one plain function a hook, with the contract's arguments.

Plugins may call these, to add to a default instead of replacing it. They are never registered as a plugin, so that a
plugin's implementation and core's default can't both run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import device_module
from drivetrain.errors import DrivetrainError
from drivetrain.nested import send_to_device
from drivetrain.world import Run, Topology, World

if TYPE_CHECKING:
    from pathlib import Path

    from drivetrain.bundle import Bundle
    from drivetrain.config import RunConfig
    from drivetrain.launch import LaunchPlan

# ---------------------------------------------------------------------------------------------- the launcher's process


def launch(plan: LaunchPlan) -> int:
    from drivetrain.launch.elastic import start

    return start(plan)


def launch_environment(plan: LaunchPlan) -> Mapping[str, str]:
    return {}


def process_count(plan: LaunchPlan) -> int:
    return max(1, torch.accelerator.device_count())


# ----------------------------------------------------------------------------------------------------------- the world


def device(topology: Topology) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = topology.local_rank if topology.device_index is None else topology.device_index
    if index >= count:
        raise DrivetrainError(
            f"process {topology.local_rank} of {topology.local_size} on this machine would have {accelerator.type} "
            f"device {index}, but there are {count}, numbered from 0. Start at most {count} processes "
            f"(num_processes), choose other devices (gpu_ids), or use device: cpu"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def compute_dtypes(device: torch.device) -> Collection[str] | None:
    return device_module.compute_dtypes(device)


def collectives(device_type: str) -> str:
    import torch.distributed as dist

    try:
        return dist.get_default_backend_for_device(device_type)
    except ValueError as error:
        raise DrivetrainError(
            f"torch knows no communication library for {device_type}. Its vendor registers one "
            f"(torch.distributed.Backend.register_backend), or the device plugin names one (hook collectives); until "
            f"then name one yourself: collectives: ..."
        ) from error


def init_world(config: RunConfig, topology: Topology, device: torch.device, collectives: str | None) -> World:
    if topology.size > 1:
        raise DrivetrainError(
            f"this run has {topology.size} processes, but its backend does not implement the hook init_world, which "
            f"brings up their communication. A backend on torch.distributed inherits it from "
            f"drivetrain_backends.TorchDistributedBackend"
        )
    return World(rank=0, size=1, device=device)


def shutdown(run: Run, error: BaseException | None) -> None:
    return None


# ------------------------------------------------------------------------------------------------------------- prepare


def init_context(run: Run) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def convert_model(run: Run, model: nn.Module) -> nn.Module:
    return model


def move_model(run: Run, model: nn.Module) -> nn.Module:
    return model.to(run.world.device)


def compile_model(run: Run, model: nn.Module, options: Mapping[str, Any]) -> None:
    model.compile(**options)


def prepare(run: Run, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    return None


def wrap_model(run: Run, model: nn.Module) -> nn.Module:
    return model


def wrap_optimizer(run: Run, optimizer: Optimizer, models: Sequence[nn.Module]) -> Optimizer:
    return optimizer


def wrap_scheduler(run: Run, scheduler: Any, optimizers: Sequence[Any]) -> Any:
    return scheduler


def wrap_loader(run: Run, loader: Iterable[Any]) -> Iterable[Any]:
    return loader


def after_prepare(run: Run, bundle: Bundle) -> None:
    return None


def release(run: Run, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    return None


# ----------------------------------------------------------------------------------------------------------------- hot


def place(run: Run, batch: Any, non_blocking: bool) -> Any:
    device = run.world.device
    if type(batch) is Tensor:
        return batch.to(device, non_blocking=non_blocking)
    if type(batch) is list:  # what torch's collate function makes of most samples: a short cut, taken on every step
        placed = []
        for item in batch:  # a list comprehension is a call
            if type(item) is Tensor:
                placed.append(item.to(device, non_blocking=non_blocking))
            else:
                placed.append(place(run, item, non_blocking))
        return placed
    if type(batch) is dict:
        return {key: place(run, value, non_blocking) for key, value in batch.items()}
    return send_to_device(batch, device, non_blocking)


def autocast(run: Run, model: nn.Module | None) -> contextlib.AbstractContextManager[Any]:
    dtype = run.policy.compute_dtype
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(run.world.device.type, dtype=dtype)


_NOTHING = contextlib.nullcontext()


def accumulate(run: Run, models: Sequence[nn.Module], last: bool) -> contextlib.AbstractContextManager[Any]:
    return _NOTHING


def backward(run: Run, loss: Tensor, models: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    loss.backward(**options)


def scale_gradients(run: Run, optimizer: Optimizer, factor: float) -> None:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor)


def clip_grad_norm(run: Run, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def clip_grad_value(run: Run, parameters: Sequence[nn.Parameter], clip_value: float) -> None:
    if any(parameter.grad is not None for parameter in parameters):  # torch fails where there is nothing to clip
        nn.utils.clip_grad_value_(parameters, clip_value)


def step(run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    if closure is None:
        optimizer.step()
    else:
        optimizer.step(closure)
    return True


def zero_grad(run: Run, optimizer: Optimizer, set_to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)


def after_step(run: Run, models: Sequence[nn.Module], applied: bool) -> None:
    return None


after_step.does_nothing = True  # type: ignore[attr-defined]  # lets a bound hook leave it out


def sync_in_backward(run: Run, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if run.world.size > 1:
        raise DrivetrainError(
            f"backend {run.names['backend']!r} can't reduce in backward the gradients of a forward under no_sync; "
            f"run the last forward outside of no_sync"
        )
    return contextlib.nullcontext()


def join(run: Run, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    if run.world.size > 1:
        raise DrivetrainError(
            f"backend {run.names['backend']!r} can't train on different numbers of batches on each rank; "
            f"leave even_batches on"
        )
    return contextlib.nullcontext()


# ----------------------------------------------------------------------------------------------- collectives, of one


def all_gather(run: Run, tensor: Tensor, group: Any) -> Tensor:
    return tensor.unsqueeze(0)


def all_reduce(run: Run, tensor: Tensor, op: str, group: Any) -> Tensor:
    return tensor.clone()


def broadcast(run: Run, tensor: Tensor, source: int, group: Any) -> Tensor:
    return tensor


def broadcast_object(run: Run, value: Any, source: int, group: Any) -> Any:
    return value


def all_gather_object(run: Run, value: Any, group: Any) -> list[Any]:
    return [value]


def barrier(run: Run, group: Any) -> None:
    return None


def reduce_ops(run: Run) -> Collection[str] | None:
    return None


# --------------------------------------------------------------------------------------------------------------- state


def save_state(run: Run, bundle: Bundle, directory: Path) -> None:
    from drivetrain.checkpoint.bundles import save_bundle

    save_bundle(run, bundle, directory)


def load_state(run: Run, bundle: Bundle, directory: Path, strict: bool) -> None:
    from drivetrain.checkpoint.bundles import load_bundle

    load_bundle(run, bundle, directory, strict)


def model_state(run: Run, model: nn.Module) -> dict[str, Tensor]:
    return dict(run.hooks.unwrap(run=run, model=model).state_dict())


def load_model_state(run: Run, model: nn.Module, state: Mapping[str, Tensor], strict: bool) -> None:
    run.hooks.unwrap(run=run, model=model).load_state_dict(state, strict=strict)


def optimizer_state(run: Run, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
    return optimizer.state_dict()


def load_optimizer_state(run: Run, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
    optimizer.load_state_dict(dict(state))


def precision_state(run: Run, models: Sequence[nn.Module]) -> dict[str, Any]:
    return {}


def load_precision_state(run: Run, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
    return None


def unwrap(run: Run, model: nn.Module) -> nn.Module:
    return model


def restore_model(run: Run, model: nn.Module) -> nn.Module:
    return model


def rng_state(run: Run) -> dict[str, Any]:
    read = getattr(device_module.module_of(run.world.device), "get_rng_state", None)
    return (
        {} if read is None else {"generator": read(run.world.device) if run.world.device.index is not None else read()}
    )


def set_rng_state(run: Run, state: Mapping[str, Any]) -> None:
    if "generator" not in state:
        return
    write = getattr(device_module.module_of(run.world.device), "set_rng_state", None)
    if write is None:
        raise DrivetrainError(
            f"this state holds a random number generator's state, but {run.world.device} has no generator torch can set"
        )
    if run.world.device.index is None:
        write(state["generator"])
    else:
        write(state["generator"], run.world.device)


# ----------------------------------------------------------------------------------------------------- device services


def seed(run: Run, seed: int) -> None:
    manual_seed = getattr(device_module.module_of(run.world.device), "manual_seed_all", None)
    if manual_seed is not None:
        manual_seed(seed)


def _is_accelerator(run: Run) -> bool:
    """Whether ``torch.accelerator`` speaks for the run's device."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == run.world.device.type


def synchronize(run: Run) -> None:
    if _is_accelerator(run):
        torch.accelerator.synchronize(run.world.device)


def empty_cache(run: Run) -> None:
    if _is_accelerator(run):
        device_module.empty_cache(run.world.device)


def memory(run: Run) -> dict[str, int]:
    if _is_accelerator(run):
        return device_module.memory(run.world.device)
    import psutil

    return {"allocated": psutil.Process().memory_info().rss, "total": psutil.virtual_memory().total}


def make_scaler(run: Run) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(run.world.device.type, **run.policy.scaler_arguments)


def bf16_supported(run: Run) -> bool:
    known = run.hooks.compute_dtypes(device=run.world.device)
    return known is None or "bfloat16" in known


def compile_backend(run: Run) -> str:
    return "inductor"


def profiler_activities(run: Run) -> list[Any]:
    return sorted(torch.profiler.supported_activities(), key=str)


def is_out_of_memory(run: Run, error: BaseException) -> bool:
    from drivetrain.memory import looks_out_of_memory

    return looks_out_of_memory(error)
