"""NOT part of a Drivetrain plugin: the chip itself, simulated. A vendor has this already, as its own torch package.

Importing it gives torch a device type ``acme`` with memory, operations, autocast, random numbers and a communication
library ``acmeccl``. Memory is the host's and operations are torch's for the CPU, so that it runs anywhere; to torch,
and to everything above, it is as foreign as any accelerator.

``ACME_SIMULATED_CHIPS`` says how many there are (2), ``ACME_VISIBLE_DEVICES`` which of them a process may use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils

from torch_acme import _C, acme

__all__ = ["set_memory_limit"]

set_memory_limit = _C.set_memory_limit


def _visible_chips(environment: Mapping[str, str]) -> list[int]:
    """Numbers of the chips that this process may use; its device ``acme:0`` is the first of them."""
    chips = list(range(int(environment.get("ACME_SIMULATED_CHIPS", "2"))))
    visible = environment.get("ACME_VISIBLE_DEVICES")
    if visible is None:
        return chips
    named = [int(number) for number in visible.split(",") if number.strip()]
    missing = [number for number in named if number not in chips]
    if missing:
        raise RuntimeError(f"ACME_VISIBLE_DEVICES={visible}: there is no chip {missing[0]}; there are {len(chips)}")
    return named


def _connect(options: Any, more: Any) -> Any:
    """One process group's collectives. ``torch.distributed`` calls it on every rank."""
    wires = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return _C.make_collectives(wires)


_C.register_device(len(_visible_chips(os.environ)))
torch.utils.rename_privateuse1_backend("acme")
torch._register_device_module("acme", acme)
sys.modules["torch.acme"] = acme
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend("acmeccl", _connect, extended_api=True, devices=["acme"])
