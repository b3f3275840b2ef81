"""The section ``ddp`` given in code, under the names that existing scripts use."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler
from drivetrain_ddp.config import PowerSgdConfig

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(str, enum.Enum):
    """Ways of compressing gradients while they are reduced."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


# From the names of scripts to those of the section, which has its own way of saying no.
_SECTION_NAMES = {
    DDPCommunicationHookType.NO: "none",
    DDPCommunicationHookType.FP16: "fp16",
    DDPCommunicationHookType.BF16: "bf16",
    DDPCommunicationHookType.POWER_SGD: "powersgd",
    DDPCommunicationHookType.BATCHED_POWER_SGD: "batched_powersgd",
}
_WRAPPERS = (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)


def _hook_type(value: Any) -> DDPCommunicationHookType | None:
    return None if value is None else DDPCommunicationHookType(value)


def _without_effect(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
    if value:
        raise ValueError(
            f"{attribute.name}={value!r}: DistributedDataParallel of torch >= 2.9 has no use for it; leave it out"
        )


def _wraps(instance: Any, attribute: attrs.Attribute, value: DDPCommunicationHookType | None) -> None:
    if value is not None and value not in _WRAPPERS:
        raise ValueError(f"comm_wrapper casts to a dtype: NO, FP16 or BF16, got {value.name}")


def _powersgd_options(instance: Any, attribute: attrs.Attribute, value: Mapping[str, Any] | None) -> None:
    known = [field.name for field in attrs.fields(PowerSgdConfig)]
    unknown = [name for name in value or () if name not in known]
    if unknown:
        raise ValueError(f"comm_state_option has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}")


@attrs.frozen
class DistributedDataParallelKwargs(KwargsHandler):
    """How ``ddp`` wraps models, given in code. Has no effect under another backend.

    Attributes:
        dim: Has no effect in today's torch; anything but 0 is refused.
        broadcast_buffers: Give all ranks rank 0's buffers in each forward.
        bucket_cap_mb: Size of a bucket of gradients reduced together, in MiB.
        find_unused_parameters: Look for parameters that took no part in a forward.
        check_reduction: Has no effect in today's torch; True is refused.
        gradient_as_bucket_view: Make gradients views into the buckets.
        static_graph: Promise that every step uses the same parameters in the same order.
        comm_hook: How gradients are compressed while they are reduced.
        comm_wrapper: Dtype gradients are cast to before ``comm_hook`` compresses them: ``NO``, ``FP16`` or ``BF16``.
        comm_state_option: Settings of the PowerSGD hooks, by the names of ``PowerSgdConfig``.

    None, everywhere: as configured outside the code.

    Raises:
        ValueError: A field is given that has no effect, or a value that is no choice.
    """

    section: ClassVar[str] = "ddp"

    dim: int | None = attrs.field(default=None, validator=_without_effect)
    broadcast_buffers: bool | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool | None = None
    check_reduction: bool | None = attrs.field(default=None, validator=_without_effect)
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    comm_hook: DDPCommunicationHookType | None = attrs.field(default=None, converter=_hook_type)
    comm_wrapper: DDPCommunicationHookType | None = attrs.field(default=None, converter=_hook_type, validator=_wraps)
    comm_state_option: Mapping[str, Any] | None = attrs.field(default=None, validator=_powersgd_options)

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the section's names."""
        given = super().values()
        given.pop("dim", None)
        given.pop("check_reduction", None)
        for name in ("comm_hook", "comm_wrapper"):
            if name in given:
                given[name] = _SECTION_NAMES[given[name]]
        for name, value in given.pop("comm_state_option", {}).items():
            given[f"powersgd.{name}"] = value
        return given
