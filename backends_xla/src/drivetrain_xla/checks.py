"""Rows for ``drivetrain doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from drivetrain.plugin import Check
from drivetrain.requirements import installed_version
from drivetrain_xla.pairing import mismatch

__all__ = ["engine"]


def engine() -> Iterator[Check]:
    """What is found of the engine, of devices, and of what comes after it."""
    wrong = mismatch()
    if wrong is not None:
        yield Check("torch_xla", False, *wrong)
    else:
        yield from _runtime()
    yield _libtpu()
    yield _successor()


def _runtime() -> Iterator[Check]:
    version = installed_version("torch_xla")
    try:
        import torch_xla.runtime as xr

        found, devices = xr.device_type(), xr.global_runtime_device_count()
    except Exception as error:  # whatever loading a compiled library or finding devices raises is a finding here
        yield Check(
            "torch_xla",
            False,
            f"{version}; bringing up its runtime raised {type(error).__name__}: {error}",
            "set PJRT_DEVICE to what the machine has (CPU, TPU, ...), and see that no other process holds the device",
        )
        return
    yield Check("torch_xla", True, f"{version}, runtime {found} with {devices} device(s)")
    said = os.environ.get("PJRT_DEVICE")
    if said is None and found == "CPU":
        yield Check("runtime", None, "nothing but the CPU was found; xla.runtime names another")


def _libtpu() -> Check:
    version = installed_version("libtpu")
    if version is None:
        return Check("libtpu", None, "not installed; needed on machines with TPUs", 'pip install "torch_xla[tpu]"')
    return Check("libtpu", True, version)


def _successor() -> Check:
    """torch_tpu makes a TPU a device of torch itself: another way than this backend, and the newer one."""
    version = installed_version("torch_tpu")
    if version is None:
        return Check(
            "torch_tpu", None, "not installed; it makes TPUs devices of torch, for device: auto with ddp or fsdp"
        )
    return Check("torch_tpu", True, f"{version}: leave backend xla out, and use device: auto with ddp or fsdp")
