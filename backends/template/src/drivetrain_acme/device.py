"""The plugin: what Drivetrain can't learn about the device from torch.

Whatever is not here, core asks torch for, by ``torch.accelerator`` and ``torch.get_device_module``: autocast and the
dtypes it takes, random numbers, memory, the name of the communication library, the gradient scaler.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.plugin import Check, Device, hookimpl

if TYPE_CHECKING:
    import torch

    from drivetrain.launch import LaunchPlan
    from drivetrain.world import Run, Topology

__all__ = ["Acme", "AcmeConfig"]


def _positive(instance: Any, attribute: attrs.Attribute, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{attribute.name} must be at least 1, got {value}")


@attrs.frozen(kw_only=True)
class AcmeConfig:
    """Section ``acme`` of the YAML."""

    memory_limit_mb: int | None = attrs.field(
        default=None,
        validator=_positive,
        metadata={"help": "memory a process may use on its chip, in MiB; null: all of it"},
    )


class Acme(Device):
    """Acme's chip."""

    api = (1, 0)
    Config = AcmeConfig
    label = "Acme chip"
    # The library under it is compiled for one version of torch, and works with that one only.
    requires = ("torch>=2.13,<2.14",)

    @classmethod
    def present(cls) -> bool:
        """Whether ``device: auto`` takes it. A real chip would be looked for, by its driver's device node say."""
        return "ACME_SIMULATED_CHIPS" in os.environ  # a simulation is not to be taken by accident

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Whether the library loads, and finds chips."""
        try:
            import torch_acme  # noqa: F401
        except ImportError as error:
            yield Check("library", False, str(error), "pip install --force-reinstall drivetrain-acme")
            return
        import torch

        count = torch.accelerator.device_count()
        yield Check("library", True, f"built for torch {torch.__version__}")
        yield Check("chips", count > 0, f"{count} visible", "" if count else "set ACME_VISIBLE_DEVICES to some")

    @hookimpl
    def process_count(self, plan: LaunchPlan) -> int:
        """A process for each visible chip, counted without the library: the launcher touches no device."""
        visible = os.environ.get("ACME_VISIBLE_DEVICES")
        if visible is None:
            return int(os.environ.get("ACME_SIMULATED_CHIPS", "2"))
        return max(1, len([number for number in visible.split(",") if number.strip()]))

    @hookimpl
    def device(self, topology: Topology) -> torch.device:
        """Bring up the library; then torch knows the device, and core's own way of choosing one is right."""
        import torch_acme
        from drivetrain import defaults

        if self.config.memory_limit_mb is not None:
            torch_acme.set_memory_limit(self.config.memory_limit_mb * 2**20)
        return defaults.device(topology)

    @hookimpl
    def reduce_ops(self, run: Run) -> Collection[str]:
        """Acme's communication library has no mean."""
        return frozenset({"sum", "product", "min", "max"})

    @hookimpl
    def compile_backend(self, run: Run) -> str:
        """There is no code generator for the chip: graphs are captured, and run operation by operation."""
        return "aot_eager"

    @hookimpl
    def is_out_of_memory(self, run: Run, error: BaseException) -> bool:
        """The library says it with a status of its own."""
        from drivetrain import defaults

        return "acmeMalloc: status 7" in str(error) or defaults.is_out_of_memory(run, error)
