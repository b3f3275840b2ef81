"""What core asks torch about a device, where torch's module of that device offers much, little or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import defaults, registry
from drivetrain.errors import DrivetrainError, PluginNotFoundError
from drivetrain.plugin import Capabilities, Policy, Precision

DEVICE = torch.device("meta")  # stands for any device type: the module that torch has for it is made up


def offer(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> Any:
    """Make these functions all that torch's module of the device has; a run on that device."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**functions))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: DEVICE)
    return SimpleNamespace(world=SimpleNamespace(device=DEVICE))


def unable(*args: Any) -> Any:
    raise RuntimeError("Allocator for this device is not a DeviceAllocator.")


@pytest.mark.parametrize(
    ("functions", "dtypes"),
    [
        ({"get_amp_supported_dtype": lambda: [torch.bfloat16]}, {"bfloat16"}),
        ({"get_amp_supported_dtype": lambda: [], "is_bf16_supported": lambda: True}, set()),
        ({"is_bf16_supported": lambda: False}, {"float16"}),
        ({"is_bf16_supported": lambda: True}, None),
        ({}, None),
    ],
)
def test_compute_dtypes_are_what_torchs_module_says(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any], dtypes: set[str] | None
) -> None:
    offer(monkeypatch, **functions)
    assert defaults.compute_dtypes(DEVICE) == dtypes


def test_memory_comes_from_the_vendors_module_where_torchs_own_way_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = offer(monkeypatch, memory_allocated=lambda device: 3, mem_get_info=lambda device: (5, 8))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, name, unable, raising=False)
    assert defaults.memory(run) == {"allocated": 3, "total": 8}


def test_memory_comes_from_torch_accelerator_where_the_vendors_module_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = offer(monkeypatch)
    for number, name in enumerate(("memory_allocated", "memory_reserved", "max_memory_allocated")):
        monkeypatch.setattr(torch.accelerator, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (1, 9), raising=False)
    assert defaults.memory(run) == {"allocated": 0, "reserved": 1, "peak": 2, "total": 9}


def test_the_cache_is_emptied_in_the_vendors_way_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = []
    defaults.empty_cache(offer(monkeypatch, empty_cache=lambda: emptied.append("own")))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append("torch's"))
    defaults.empty_cache(offer(monkeypatch))
    monkeypatch.setattr(torch.accelerator, "empty_cache", unable)
    defaults.empty_cache(offer(monkeypatch))
    assert emptied == ["own", "torch's"]


def test_a_device_without_a_communication_library_says_how_to_name_one() -> None:
    with pytest.raises(DrivetrainError, match="no communication library for meta") as raised:
        defaults.collectives("meta")
    assert "collectives: ..." in str(raised.value)


class Eighths(Precision):
    """Computes in a dtype that few devices have."""

    policy = Policy(compute="float16")


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        (None, None),
        ({"float16", "bfloat16"}, None),
        ({"bfloat16"}, "it computes in float16, and the device computes in bfloat16"),
        (set(), "it computes in float16, and the device computes in none of those"),
    ],
)
def test_a_precision_is_refused_for_a_device_without_its_dtype(dtypes: set[str] | None, reason: str | None) -> None:
    assert registry.refusal(Eighths(), Capabilities(), "any", dtypes) == reason


def test_full_precision_needs_nothing_of_the_device() -> None:
    assert registry.refusal(Precision(), Capabilities(), "any", frozenset()) is None


def test_members_of_a_family_that_the_device_can_not_compute_are_passed_over(site: Any) -> None:
    policy = "family = 'half'\nfamily_rank = {rank}\npolicy = Policy(compute='{dtype}')"
    site.install_precision("first", policy.format(rank=0, dtype="float16"))
    site.install_precision("second", policy.format(rank=1, dtype="bfloat16"))
    entry, notes = registry.resolve_precision("half", "any", Capabilities(), dtypes={"bfloat16"})
    assert entry.name == "second"
    assert any("first" in note and "float16" in note for note in notes)
    with pytest.raises(PluginNotFoundError):
        registry.resolve_precision("quarter", "any", Capabilities(), dtypes={"bfloat16"})
