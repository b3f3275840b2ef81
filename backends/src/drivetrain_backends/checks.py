"""Rows for ``drivetrain doctor`` that all torch.distributed backends share."""

from __future__ import annotations

from drivetrain.plugin import Check

__all__ = ["torch_distributed"]


def torch_distributed() -> list[Check]:
    """Whether torch can communicate, over what on the CPU, and over what on the accelerator, if there is one."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [Check("torch.distributed", False, "this torch was built without it", "install torch's official wheel")]
    return [
        Check("torch.distributed", True, f"torch {torch.__version__}"),
        Check(
            "communication on the CPU (gloo)",
            dist.is_gloo_available(),
            fix="" if dist.is_gloo_available() else "install a torch built with gloo",
        ),
        _accelerator(),
    ]


def _accelerator() -> Check:
    import torch
    import torch.distributed as dist

    name = "communication on the accelerator"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Check(name, None, "torch sees no accelerator here")
    library = dist.Backend.default_device_backend_map.get(accelerator.type)
    if library is None:
        return Check(
            name,
            False,
            f"torch knows no communication library for {accelerator.type}",
            "install the vendor's, or name one: collectives: ...",
        )
    ready = dist.is_backend_available(library)
    return Check(name, ready, f"{library} for {accelerator.type}", "" if ready else f"install a torch with {library}")
