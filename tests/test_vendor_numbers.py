"""What differs between vendors, tried on a made-up one: random numbers, number formats and memory.

The device is the plugin template's, on real processes. docs/vendors.md says which branch point each test is for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# The first test of a checkout compiles the chip's library.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


# -------------------------------------------------------------------------------------------------- random numbers


def draw(folder: str, action: str) -> list[Tensor]:
    """Draw on the device and on the CPU, after saving or loading a checkpoint."""
    from drivetrain import Accelerator, set_seed

    accelerator = Accelerator()
    if action == "save":
        set_seed(7, device_specific=True)
        torch.rand(5, device=accelerator.device)  # the device's generator is ahead of the CPU's from here
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return [torch.rand(4, device=accelerator.device).cpu(), torch.rand(4)]


def test_every_ranks_device_generator_is_saved_and_loaded(chips: Any, tmp_path: Path) -> None:
    saved = chips.two(draw, str(tmp_path / "state"), "save")
    loaded = chips.two(draw, str(tmp_path / "state"), "load")
    for before, after in zip(saved, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not torch.equal(before[0], before[1]), "the device draws from the CPU's generator"
    assert not torch.equal(saved[0][0], saved[1][0]), "both ranks draw the same"


def seeded(seed: int) -> tuple[Tensor, Tensor]:
    """What the device draws after seeding, and after sharing rank 0's state."""
    from drivetrain import Accelerator, set_seed
    from drivetrain.seeding import synchronize_rng_state

    accelerator = Accelerator()
    set_seed(seed, device_specific=True)
    own = torch.rand(4, device=accelerator.device).cpu()
    synchronize_rng_state(accelerator.device.type)
    return own, torch.rand(4, device=accelerator.device).cpu()


def test_set_seed_seeds_the_device_and_ranks_can_share_its_state(chips: Any) -> None:
    (first, shared), (second, shared_too) = chips.two(seeded, 3)
    assert torch.equal(first, chips.two(seeded, 3)[0][0])
    assert not torch.equal(first, second)
    assert torch.equal(shared, shared_too)


# ------------------------------------------------------------------------------------------------------- precisions


def computes_in() -> tuple[str, str, str]:
    """Dtypes of a layer's output inside a prepared model, of what it returns, and of its weight's gradient."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    seen = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(1, 1, 3))
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model[0].register_forward_hook(lambda module, inputs, output: output.unsqueeze(1))
    prepared = accelerator.prepare(model)
    output = prepared(torch.ones(2, 8, device=accelerator.device))
    accelerator.backward(output.sum())
    return str(seen[0]), str(output.dtype), str(accelerator.unwrap_model(prepared)[0].weight.grad.dtype)


@pytest.mark.parametrize(("precision", "dtype"), [("no", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_autocast_computes_in_the_precisions_dtype(chips: Any, precision: str, dtype: str) -> None:
    found = chips.one(computes_in, mixed_precision=precision)
    assert found == (f"torch.{dtype}", "torch.float32", "torch.float32")


def start_without_fp16() -> tuple[str, bool, bool]:
    """Start a run in fp16 on a chip that has no such numbers; the refusal, and what is left of the run."""
    import torch_acme  # noqa: F401
    from drivetrain import Accelerator
    from drivetrain.errors import DrivetrainError
    from drivetrain.operations import is_bf16_available

    with replaced(torch.acme, "get_amp_supported_dtype", lambda: [torch.bfloat16]):
        try:
            Accelerator(mixed_precision="fp16")
        except DrivetrainError as error:
            refused = str(error)
        group = torch.distributed.is_initialized()
        Accelerator(mixed_precision="bf16")
        return refused, group, is_bf16_available()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute is another one. Processes of a pool run more than one test."""
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


def test_a_dtype_the_device_lacks_is_refused_not_left_out(chips: Any) -> None:
    for refused, group, bf16 in chips.two(start_without_fp16):
        assert "mixed_precision 'fp16' can't be combined" in refused
        assert "computes in float16, and the device computes in bfloat16" in refused
        assert not group, "the process group was made before the precision was refused"
        assert bf16


def overflow() -> tuple[str, list[bool], float, float]:
    """Two updates with loss scaling, the first of which overflows on the last rank."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    applied = []
    for factor in (float("inf") if accelerator.is_last_process else 1.0, 1.0):
        accelerator.backward(model(torch.ones(1, 1, device=accelerator.device)).sum() * factor)
        optimizer.step()
        applied.append(not optimizer.step_was_skipped)
        optimizer.zero_grad()
    weight = accelerator.get_state_dict(model).get("weight", torch.zeros(1)).item()
    return type(accelerator.scaler).__name__, applied, weight, accelerator.scaler.get_scale()


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_loss_scaling_on_the_device_skips_an_overflow_on_all_ranks(chips: Any, backend: str) -> None:
    config = {"backend": backend, "mixed_precision": "fp16", "fp16": {"init_scale": 8.0}}
    for _, applied, weight, scale in chips.two(overflow, **config):
        assert (applied, scale) == ([False, True], 4.0)
        assert weight in (0.5, 0.0), "0.0: fsdp gives the full weights to rank 0 only"


def own_scaler() -> str:
    """The class of the scaler where the device plugin makes one of its own."""
    from drivetrain import Accelerator
    from drivetrain.plugin import hookimpl
    from drivetrain_acme import Acme

    class AcmeScaler(torch.amp.GradScaler):
        """Of the vendor."""

    def make_scaler(self, run: Any) -> Any:
        return AcmeScaler(run.world.device.type, **run.policy.scaler_arguments)

    with replaced(Acme, "make_scaler", hookimpl(make_scaler)):
        return type(Accelerator(mixed_precision="fp16").scaler).__name__


def test_a_vendors_own_scaler_class_is_used(chips: Any) -> None:
    assert chips.one(own_scaler) == "AcmeScaler"
    assert chips.two(own_scaler) == ["AcmeScaler"] * 2


# ------------------------------------------------------------------------------------------------------------ memory


def measure() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Memory of the run's device before, with and after a tensor of 4 MB."""
    from drivetrain import Accelerator
    from drivetrain.memory import clear_device_cache

    gc.collect()  # what tests before this one have left in the process
    run = Accelerator().run
    before = run.hooks.memory(run=run)
    tensor = torch.empty(2**20, device=run.world.device)
    run.hooks.synchronize(run=run)
    during = run.hooks.memory(run=run)
    del tensor
    clear_device_cache()
    return before, during, run.hooks.memory(run=run)


def test_memory_is_that_of_the_device(chips: Any) -> None:
    for before, during, after in chips.two(measure, acme={"memory_limit_mb": 64}):
        assert set(before) == {"allocated", "reserved", "peak", "total"}
        assert during["allocated"] - before["allocated"] == 4 * 2**20
        assert after["allocated"] == before["allocated"]
        assert after["peak"] >= during["allocated"]
        assert after["total"] == 64 * 2**20


def shrink() -> list[int]:
    """Batch sizes tried until one fits."""
    from drivetrain import Accelerator, find_executable_batch_size

    device = Accelerator().device
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        torch.empty(batch_size, 2**18, device=device)  # a megabyte a sample

    work()
    return tried


def test_a_lack_of_memory_is_recognised_in_the_vendors_words(chips: Any) -> None:
    assert chips.one(shrink, acme={"memory_limit_mb": 20}) == [64, 32, 16]
