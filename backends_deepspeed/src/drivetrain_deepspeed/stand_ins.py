"""Optimizers and schedules that the engine's configuration describes, in place of the stand-ins the program gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain_deepspeed.dummies import DummyOptim, DummyScheduler
from drivetrain_deepspeed.engine_file import EngineFile

__all__ = ["optimizer_section", "scheduler"]


def optimizer_section(file: EngineFile, optimizer: Any) -> dict[str, Any] | None:
    """The file's section on the optimizer, filled in from a stand-in; None for an optimizer of the program's own.

    Raises:
        ConfigError: There is an optimizer on one side too many, or on none.
    """
    said = file.get("optimizer")
    if not isinstance(optimizer, DummyOptim):
        if said is not None:
            raise ConfigError(
                f"{file.name} has an optimizer, and the program prepares a {type(optimizer).__name__}; take it out of "
                f"the file, or prepare a DummyOptim in its place"
            )
        return None
    if said is None:
        raise ConfigError(
            f"the program prepares a DummyOptim, which stands for an optimizer in {file.name}, but there is none; "
            f'write "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}} into deepspeed.config_file'
        )
    given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    return {**said, "params": _filled(said.get("params") or {}, given)}


def _filled(params: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Parameters with ``auto`` filled in; what nobody gave is left to the engine's default."""
    return {
        key: given.get(key) if value == "auto" else value
        for key, value in params.items()
        if value != "auto" or given.get(key) is not None
    }


def scheduler(file: EngineFile, given: Any, optimizers: Sequence[Any]) -> Any:
    """The schedule a stand-in stands for, on the optimizer that the user sees; one of the program's own as it is.

    What a stand-in stands for moves by one for each update.

    Args:
        file: The engine's own configuration.
        given: What the program prepares.
        optimizers: The prepared optimizers that move it.

    Raises:
        ConfigError: There is a schedule on one side too many, or on none.
    """
    if not isinstance(given, DummyScheduler):
        if file.get("scheduler") is not None:
            raise ConfigError(
                f"{file.name} has a scheduler, and the program prepares a {type(given).__name__}; take it out of the "
                f"file, or prepare a DummyScheduler in its place"
            )
        return given
    if len(optimizers) != 1:
        raise ConfigError(
            f"a DummyScheduler belongs to one optimizer, and there are {len(optimizers)}; make it of the one it moves"
        )
    made = _made(file, given, optimizers[0].optimizer)
    made.counts = "updates"
    return made


def _made(file: EngineFile, stand_in: DummyScheduler, optimizer: Any) -> Any:
    said = file.get("scheduler")
    if stand_in.lr_scheduler_callable is not None:
        if said is not None:
            raise ConfigError(
                f"{file.name} has a scheduler, and the DummyScheduler an lr_scheduler_callable; leave out one of them"
            )
        return stand_in.lr_scheduler_callable(optimizer)
    if said is None:
        raise ConfigError(
            f"the program prepares a DummyScheduler, but {file.name} has no scheduler, and it was given no "
            f"lr_scheduler_callable; add one of them"
        )
    from deepspeed.runtime import lr_schedules

    cls = getattr(lr_schedules, said.get("type", ""), None)
    if cls is None:
        offered = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        raise ConfigError(f"scheduler.type is {said.get('type')!r} in {file.name}; the engine has {offered}")
    rate = max(group["lr"] for group in optimizer.param_groups)
    given = {
        "warmup_min_lr": 0,
        "warmup_max_lr": rate,
        "warmup_num_steps": stand_in.warmup_num_steps,
        "total_num_steps": stand_in.total_num_steps,
        **stand_in.kwargs,
    }
    return cls(optimizer, **_filled(said.get("params") or {}, given))
