"""The plugins core brings itself: one backend, two devices, three precisions. Found by entry point, like all others.

Light on purpose, as every module an entry point names: torch is imported in the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from drivetrain.plugin import Backend, Device, Policy, Precision, hookimpl

if TYPE_CHECKING:
    import torch

    from drivetrain.launch import LaunchPlan
    from drivetrain.world import Run, Topology

__all__ = ["Bf16", "Cpu", "Fp16", "Fp16Config", "No", "Single", "TorchDevice"]


class Single(Backend):
    """One process, one device. Implements no hook: it is core's defaults."""

    api = (1, 0)


class TorchDevice(Device):
    """Whatever accelerator torch itself reports, the CPU if there is none. Implements no hook, as ``single``."""

    api = (1, 0)
    generic: ClassVar[bool] = True


class Cpu(Device):
    """The CPU, also where there is an accelerator."""

    api = (1, 0)
    label = "CPU process"

    @hookimpl
    def device(self, topology: Topology) -> torch.device:
        import torch

        return torch.device("cpu")

    @hookimpl
    def process_count(self, plan: LaunchPlan) -> int:
        return 1

    @hookimpl
    def rng_state(self, run: Run) -> dict[str, Any]:
        return {}

    @hookimpl
    def set_rng_state(self, run: Run, state: dict[str, Any]) -> None:
        """Nothing to do: core keeps the CPU generator itself."""

    @hookimpl
    def synchronize(self, run: Run) -> None:
        """Nothing to do: nothing is queued on the CPU."""

    @hookimpl
    def empty_cache(self, run: Run) -> None:
        """Nothing to do: torch keeps no cache of CPU memory."""


class No(Precision):
    """Compute in the dtype of the model."""

    api = (1, 0)

    @property
    def policy(self) -> Policy:
        return Policy(output=None)


def _positive(instance: Any, attribute: attrs.Attribute, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be above 0, got {value!r}")


@attrs.frozen(kw_only=True)
class Bf16Config:
    """Section ``bf16``."""

    output: Literal["float32", "bfloat16"] = attrs.field(
        default="float32", metadata={"help": "dtype of the outputs of a prepared model"}
    )


class Bf16(Precision):
    """Forward under bfloat16 autocast, fp32 weights and gradients, no loss scaling."""

    api = (1, 0)
    Config = Bf16Config

    @property
    def policy(self) -> Policy:
        return Policy(compute="bfloat16", output=self.config.output)


@attrs.frozen(kw_only=True)
class Fp16Config:
    """Section ``fp16``. Defaults are those of ``torch.amp.GradScaler``."""

    output: Literal["float32", "float16"] = attrs.field(
        default="float32", metadata={"help": "dtype of the outputs of a prepared model"}
    )
    init_scale: float = attrs.field(default=65536.0, validator=_positive, metadata={"help": "first loss scale"})
    growth_factor: float = attrs.field(
        default=2.0, validator=attrs.validators.gt(1.0), metadata={"help": "factor of one growth of the scale"}
    )
    backoff_factor: float = attrs.field(
        default=0.5,
        validator=[attrs.validators.gt(0.0), attrs.validators.lt(1.0)],
        metadata={"help": "factor after an overflow"},
    )
    growth_interval: int = attrs.field(
        default=2000, validator=_positive, metadata={"help": "updates without overflow before the scale grows"}
    )
    enabled: bool = attrs.field(default=True, metadata={"help": "whether losses are scaled at all"})


class Fp16(Precision):
    """Forward under float16 autocast, fp32 weights, dynamic loss scaling (Micikevicius et al., ICLR 2018)."""

    api = (1, 0)
    Config = Fp16Config

    @property
    def policy(self) -> Policy:
        options = attrs.asdict(self.config)
        output = options.pop("output")
        enabled = options.pop("enabled")
        return Policy(
            compute="float16",
            output=output,
            loss_scale="dynamic" if enabled else None,
            scaler_options=options,
        )
