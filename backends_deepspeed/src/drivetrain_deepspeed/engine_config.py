"""The configuration an engine gets: the user's file and section, and whatever is `auto` filled in from the run.

Accumulating, clipping and batch sizes are core's affair: the engine is told of one micro-batch and no clipping. That
the file agrees with the run is checked.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.errors import ConfigError
from drivetrain.plugin import Policy
from drivetrain_deepspeed.config import DeepSpeedConfig, engine_values
from drivetrain_deepspeed.engine_file import EngineFile

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.launch import LaunchPlan

__all__ = ["Setting", "build", "check_agreement", "check_batches", "check_launch", "disagreements"]

logger = logging.getLogger(__name__)

_ENGINES_OWN = ("optimizer", "scheduler")
"""Sections of the file that are used only where a stand-in asks for them."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_COMPUTE = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
"""Compute dtypes of core's own precisions."""
_HALVES = {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16",)}
"""Sections of the file that turn on a compute dtype, by its name."""


def build(
    config: DeepSpeedConfig, policy: Policy, model: nn.Module, *, trains: bool, optimizer: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The configuration of the engine of one model.

    Args:
        config: The section of the run.
        policy: Number formats of the run.
        model: The user's, whose hidden size decides some buffer sizes that are ``auto``.
        trains: Whether it gets an optimizer.
        optimizer: Of the file, with ``auto`` filled in; None: the program's own.

    Raises:
        ConfigError: Something is ``auto`` that can't be known.
    """
    made = copy.deepcopy(dict(config.file.content))
    for _, path, value in engine_values(config):
        _put(made, path, value)
    _put(made, "zero_optimization.stage", config.stage if trains or config.stage == 3 else 0)
    for key in (
        *_ENGINES_OWN,
        "train_batch_size",
        "managed_gradient_accumulation",
        *(name for names in _HALVES.values() for name in names),
    ):
        made.pop(key, None)
    made |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    made.setdefault("zero_allow_untested_optimizer", True)
    if config.stage == 1 and made["zero_optimization"].get("overlap_comm"):
        made["zero_optimization"]["overlap_comm"] = False
        logger.warning(
            "overlap_comm has no effect at stage 1: gradients are reduced once, when their group is complete"
        )
    if config.stage > 0 and policy.compute in _HALVES:
        made[_HALVES[policy.compute][0]] = _half(config.file, policy)
    if policy.reduce is not None:
        made["communication_data_type"] = _reduction(config, policy.reduce)
    if optimizer is not None:
        made["optimizer"] = dict(optimizer)
    _fill_by_hidden_size(made, model)
    left = list(EngineFile(made).autos())
    if left:
        raise ConfigError(
            f"{config.file.name} says auto for {', '.join(left)}, which nothing here decides; write a number or leave "
            f"it out for the engine's default"
        )
    return made


def _put(content: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    content[key] = value


def _half(file: EngineFile, policy: Policy) -> dict[str, Any]:
    """The engine's section on a half precision: the file's, what is ``auto`` in it as the policy says."""
    assert policy.compute is not None
    said: dict[str, Any] = {}
    for name in _HALVES[policy.compute]:
        said |= file.get(name) or {}
    said = {key: value for key, value in said.items() if value != "auto"}
    if policy.compute == "float16":
        said = {**_scaling(policy), **said}
    return {**said, "enabled": True}


def _reduction(config: DeepSpeedConfig, reduce: str) -> str:
    """The dtype that the precision has gradients reduced in, in the engine's words."""
    wanted = _SHORT.get(reduce)
    said = config.communication_data_type or config.file.get("communication_data_type")
    if wanted is None:
        raise ConfigError(f"the engine can't reduce gradients in {reduce}, as the precision asks")
    if said not in (None, "auto", wanted):
        raise ConfigError(
            f"communication_data_type is {said}, but the precision has gradients reduced in {reduce}; leave it out"
        )
    return wanted


def _scaling(policy: Policy) -> dict[str, Any]:
    """The policy's loss scaling in the engine's words; it doubles and halves, whatever the policy's factors are."""
    options = policy.scaler_options
    if policy.loss_scale != "dynamic":
        return {"loss_scale": float(policy.loss_scale or 1.0)}
    power = int(float(options.get("init_scale", 65536.0))).bit_length() - 1
    return {
        "loss_scale": 0,
        "initial_scale_power": power,
        "loss_scale_window": int(options.get("growth_interval", 2000)),
        "hysteresis": 1,
    }


# ---------------------------------------------------------------------------------------------------------- hidden size

_BY_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "param_persistence_threshold": lambda hidden: 10 * hidden,
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def _fill_by_hidden_size(made: dict[str, Any], model: nn.Module) -> None:
    zero = made["zero_optimization"]
    wanted = [key for key in _BY_HIDDEN_SIZE if zero.get(key) == "auto"]
    if not wanted:
        return
    hidden = _hidden_size(model)
    if hidden is None:
        raise ConfigError(
            f"zero_optimization.{', '.join(wanted)} are auto, which follow from the model's hidden size, but "
            f"{type(model).__name__} has no config.hidden_size (nor hidden_sizes or d_model); write numbers"
        )
    for key in wanted:
        zero[key] = _BY_HIDDEN_SIZE[key](hidden)


def _hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "d_model"):
            size = getattr(holder, name, None)
            if isinstance(size, (list, tuple)) and size:
                return int(max(size))
            if isinstance(size, int):
                return size
    return None


# ----------------------------------------------------------------------------------------------------------- agreement


@attrs.frozen(kw_only=True)
class Setting:
    """A setting of core that the file may have a word on."""

    key: str
    value: Any
    origin: str
    """Where it was given."""


def disagreements(
    file: EngineFile, *, compute: str | None, precision: Setting, accumulation: Setting | None
) -> Iterator[str]:
    """What the file says otherwise than core's settings, one line each.

    Args:
        file: The engine's own configuration.
        compute: Dtype the precision computes in.
        precision: The setting ``mixed_precision``.
        accumulation: The setting ``gradient_accumulation_steps``; None: not to be compared.
    """
    for dtype, sections in _HALVES.items():
        for section in sections:
            said = file.get(f"{section}.enabled")
            if isinstance(said, bool) and said is not (compute == dtype):
                yield _line(file, f"{section}.enabled", said, precision)
    if accumulation is not None:
        said = file.get("gradient_accumulation_steps")
        if said not in (None, "auto", accumulation.value):
            yield _line(file, "gradient_accumulation_steps", said, accumulation)


def _line(file: EngineFile, path: str, said: Any, setting: Setting) -> str:
    text = str(said).lower() if isinstance(said, bool) else str(said)
    return f"{path} is {text} in {file.name}, and {setting.key} is {setting.value} ({setting.origin})"


def check_agreement(file: EngineFile, lines: Iterator[str]) -> None:
    """Raise one error that lists every disagreement.

    Raises:
        ConfigError: There are any.
    """
    found = list(lines)
    if found:
        listed = "".join(f"\n  {line}" for line in found)
        raise ConfigError(
            f"deepspeed.config_file ({file.name}) and the settings of the run contradict each other:{listed}\n"
            f"Change one of the two, or write auto in the file"
        )


def check_batches(file: EngineFile, *, micro: int | None, steps: int | None, processes: int | None) -> None:
    """Make sure that batch sizes of the file multiply, and are those of the loaders.

    Args:
        file: The engine's own configuration.
        micro: Batch size of the loaders, on one process; None: not known.
        steps: Micro-batches in a group; None: the file's.
        processes: Of the run; None: not known.

    Raises:
        ConfigError: They don't, or aren't.
    """
    own, total = (_number(file, key) for key in ("train_micro_batch_size_per_gpu", "train_batch_size"))
    if own is not None and micro is not None and own != micro:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {own} in {file.name}, and the prepared loader gives batches of {micro} "
            f"on each process; make them equal, or write auto in the file"
        )
    micro = own or micro
    steps = steps or _number(file, "gradient_accumulation_steps")
    if None in (total, micro, steps, processes):
        return
    assert micro is not None
    assert steps is not None
    assert processes is not None
    if total != micro * steps * processes:
        raise ConfigError(
            f"train_batch_size is {total} in {file.name}, but {micro} samples x {steps} micro-batches x {processes} "
            f"processes are {micro * steps * processes}; write auto for one of them"
        )


def check_launch(file: EngineFile, plan: LaunchPlan) -> None:
    """What the launcher can find wrong with the file before it starts a process.

    Raises:
        ConfigError: It contradicts the settings of the run, or batch sizes do not multiply.
    """
    precision = Setting(
        key="mixed_precision", value=plan.precision, origin=plan.origins.get("mixed_precision", "default")
    )
    if plan.precision in _COMPUTE:  # of others only a worker knows what they compute in
        lines = disagreements(file, compute=_COMPUTE[plan.precision], precision=precision, accumulation=None)
        check_agreement(file, lines)
    check_batches(file, micro=None, steps=None, processes=plan.processes_total)


def _number(file: EngineFile, key: str) -> int | None:
    said = file.get(key)
    return said if isinstance(said, int) else None
