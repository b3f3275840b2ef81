"""Section ``xla`` of the YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

__all__ = ["AXES", "RUNTIME", "MeshConfig", "XlaConfig", "planned_runtime"]

AXES = ("data", "fsdp", "model")
"""Axes of the mesh, in its order."""

RUNTIME = "PJRT_DEVICE"
"""The engine's own variable for what it runs on."""

_positive = attrs.validators.optional(attrs.validators.ge(1))


@attrs.frozen(kw_only=True)
class MeshConfig:
    """Section ``xla.mesh``: how many devices lie along each axis. Their product must be the number of devices."""

    data: int | None = attrs.field(
        default=None,
        validator=_positive,
        metadata={"help": "copies of the model, each fed its own samples; null: the devices the other axes leave"},
    )
    fsdp: int = attrs.field(
        default=1,
        validator=attrs.validators.ge(1),
        metadata={"help": "devices that cut parameters, gradients and optimizer state among them, and the samples too"},
    )
    model: int = attrs.field(
        default=1,
        validator=attrs.validators.ge(1),
        metadata={"help": "devices that share each sample; `partition` says what they cut"},
    )


def _patterns(instance: Any, attribute: attrs.Attribute, value: Mapping[str, Sequence[str | None]]) -> None:
    for pattern, axes in value.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{attribute.name}: {pattern!r} is no regular expression: {error}") from None
        wrong = [axis for axis in axes if axis is not None and axis not in AXES]
        if wrong:
            raise ValueError(
                f"{attribute.name}.{pattern}: {wrong[0]!r} is no axis of the mesh; name one of {', '.join(AXES)}, or "
                f"null, for each dimension of the parameter"
            )


@attrs.frozen(kw_only=True)
class XlaConfig:
    """Section ``xla``."""

    runtime: str | None = attrs.field(
        default=None,
        metadata={
            "help": "CPU, TPU, ... as the variable PJRT_DEVICE; null: what the variable says, else what is found"
        },
    )
    cpu_devices: int | None = attrs.field(
        default=None,
        validator=_positive,
        metadata={
            "help": "into how many devices runtime CPU divides the processor, to try a mesh without the hardware"
        },
    )
    spmd: bool = attrs.field(
        default=False, metadata={"help": "one process drives all devices of its machine, and the compiler divides work"}
    )
    mesh: MeshConfig = attrs.field(factory=MeshConfig, metadata={"help": "how spmd arranges the devices"})
    partition: dict[str, tuple[str | None, ...]] = attrs.field(
        factory=dict,
        validator=_patterns,
        metadata={"help": "regular expression of parameter names: the axis (or null) that cuts each dimension"},
    )
    fsdp_blocks: tuple[str, ...] = attrs.field(
        default=(),
        metadata={
            "help": "for axis fsdp: classes of modules computed one after the other; empty: the model's own list of "
            "modules not to be split"
        },
    )
    cache_dir: str | None = attrs.field(
        default=None, metadata={"help": "folder that keeps compiled graphs from run to run"}
    )
    recompilation_limit: int = attrs.field(
        default=3,
        validator=attrs.validators.ge(0),
        metadata={"help": "graphs compiled anew, once training is under way, before a warning; 0: never warn"},
    )

    def __attrs_post_init__(self) -> None:
        if not self.spmd:
            given = {"mesh": self.mesh != MeshConfig(), "partition": self.partition, "fsdp_blocks": self.fsdp_blocks}
            idle = [name for name, value in given.items() if value]
            if idle:
                raise ValueError(f"{', '.join(idle)}: no effect without spmd: true")
        if self.fsdp_blocks and self.mesh.fsdp == 1:
            raise ValueError("fsdp_blocks: no effect without an axis fsdp in mesh")
        if self.cpu_devices is not None and self.runtime != "CPU":
            raise ValueError("cpu_devices: no effect without runtime: CPU")


def planned_runtime(config: XlaConfig) -> str | None:
    """What the engine will run on, as far as that can be told without touching it; None: what it finds."""
    return config.runtime or os.environ.get(RUNTIME) or None
