"""What differs between vendors, tried on a made-up one: which device a process gets, and what runs on it.

The device is the plugin template's, on real processes. docs/vendors.md says which branch point each test is for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.testing.pool import WorkerError, WorkerPool

# The first test of a checkout compiles the chip's library.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


# ------------------------------------------------------------------------------------------- which device, how many


def where() -> tuple[Any, ...]:
    """The run's device, torch's current one, that of a tensor made without an index, and the library in use."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    made = torch.empty(1, device="acme").device
    return (
        str(accelerator.device),
        torch.accelerator.current_device_index(),
        str(made),
        accelerator.run.world.collectives,
    )


def test_each_process_has_a_device_with_its_index_and_the_vendors_collectives(chips: Any) -> None:
    assert chips.two(where) == [("acme:0", 0, "acme:0", "acmeccl"), ("acme:1", 1, "acme:1", "acmeccl")]


def test_gpu_ids_choose_the_device_of_a_vendor_too(chips: Any) -> None:
    assert chips.one(where, gpu_ids=[1])[:3] == ("acme:1", 1, "acme:1")
    assert [found[0] for found in chips.two(where, gpu_ids=[1, 0])] == ["acme:1", "acme:0"]


def chosen() -> str:
    """Which device plugin the run took."""
    from drivetrain import Accelerator

    return Accelerator().run.names["device"]


@pytest.mark.parametrize(("environment", "name"), [({"ACME_SIMULATED_CHIPS": "1"}, "acme"), ({}, "torch")])
def test_auto_takes_a_vendors_device_where_its_hardware_is(acme: Path, environment: dict[str, str], name: str) -> None:
    with WorkerPool(1, environment) as pool:
        assert pool.run(chosen, config={"device": "auto"}, timeout=90) == [name]


def test_the_vendors_variable_says_which_devices_there_are(acme: Path) -> None:
    config = {"device": "acme", "gpu_ids": [1]}
    with WorkerPool(1, {"ACME_SIMULATED_CHIPS": "2", "ACME_VISIBLE_DEVICES": "1"}) as pool:
        assert pool.run(where, config={"device": "acme"}, timeout=90)[0][0] == "acme:0"
        with pytest.raises(WorkerError) as raised:
            pool.run(where, config=config, timeout=90)
    text = raised.value.of(0).message
    assert "would have acme device 1, but there are 1" in text
    assert "num_processes" in text
    assert "gpu_ids" in text


@pytest.mark.parametrize(
    ("environment", "settings", "processes"),
    [
        ({}, {}, 2),
        ({"ACME_SIMULATED_CHIPS": "3"}, {}, 3),
        ({"ACME_VISIBLE_DEVICES": "1,0,"}, {}, 2),
        ({"ACME_VISIBLE_DEVICES": "1"}, {}, 1),
        ({}, {"gpu_ids": [1]}, 1),
    ],
)
def test_the_launcher_starts_a_process_for_each_visible_device(
    acme: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    settings: dict[str, Any],
    processes: int,
) -> None:
    from drivetrain.launch.script import ready
    from drivetrain.testing.conformance.subject import Suite

    for name in ("ACME_SIMULATED_CHIPS", "ACME_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolved = Suite(device="acme", settings=settings).resolved(tmp_path)
    assert ready(resolved, "drivetrain", module=True).plan.processes == processes
    assert "torch_acme" not in sys.modules, "the launcher touched the device"


# --------------------------------------------------------------------------------------------------------- training


def train(pin_memory: bool = False) -> tuple[dict[str, Tensor], str]:
    """Train a small model on the run's shards; the full weights (on rank 0), and the device of its batches."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model, (inputs, targets) = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # before the parameters are moved
    size = 16 // accelerator.num_processes
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=size, pin_memory=pin_memory)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(F.mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return {name: value.detach().cpu() for name, value in state.items()}, x.device.type


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and its data, the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    inputs = torch.randn(64, 16, generator=generator)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), (inputs, inputs[:, :4].sin())


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Tensor]:
    """The same training in plain torch on the CPU, on whole batches."""
    model, (inputs, targets) = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(right)
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_training_on_two_devices_equals_plain_torch(chips: Any, by_hand: dict[str, Tensor], backend: str) -> None:
    weights, device = chips.two(train, backend=backend)[0]
    check(weights, by_hand)
    assert device == "acme"


def test_pinned_loaders_feed_the_device(chips: Any, by_hand: dict[str, Tensor]) -> None:
    weights, device = chips.one(train, True)
    check(weights, by_hand)
    assert device == "acme"


def test_models_are_compiled_by_the_devices_own_backend(chips: Any, by_hand: dict[str, Tensor]) -> None:
    weights, _ = chips.one(train, compile={})
    check(weights, by_hand)


def compiled_with() -> str:
    """The backend torch.compile is given where the user named none."""
    from drivetrain import Accelerator

    run = Accelerator().run
    found: str = run.hooks.compile_backend(run=run)
    return found


def test_the_compile_backend_is_the_devices(chips: Any) -> None:
    assert chips.one(compiled_with) == "aot_eager"


def meta_start() -> tuple[dict[str, Tensor], str]:
    """Build a model without values on all ranks but the first; the full weights, and where this rank's part lies."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    with accelerator.init_context():
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    part = next(model.parameters()).to_local()
    return {name: value.cpu() for name, value in state.items()}, str(part.device)


def test_values_go_from_rank_0_to_every_ranks_own_device(chips: Any) -> None:
    settings = {"cpu_ram_efficient_loading": True, "sync_module_states": True}
    found = chips.two(meta_start, backend="fsdp", fsdp=settings)
    assert [device for _, device in found] == ["acme:0", "acme:1"]
    assert all(value.abs().sum() > 0 for value in found[0][0].values())


def averages() -> tuple[str, float, float]:
    """What the vendor's library says of a mean, what the run makes of one, and of one in bfloat16."""
    import torch.distributed as dist

    from drivetrain import Accelerator

    accelerator = Accelerator()
    mine = torch.tensor([float(accelerator.process_index)], device=accelerator.device)
    try:
        dist.all_reduce(mine.clone(), op=dist.ReduceOp.AVG)
    except RuntimeError as error:
        refused = str(error)
    accelerator.wait_for_everyone()
    return refused, accelerator.reduce(mine, "mean").item(), accelerator.reduce(mine.bfloat16(), "mean").item()


def test_means_do_without_a_reduction_that_the_vendor_lacks(chips: Any) -> None:
    for refused, mean, narrow in chips.two(averages):
        assert "acmeccl has no reduction AVG" in refused
        assert (mean, narrow) == (0.5, 0.5)


def profiled() -> tuple[list[str], list[str]]:
    """What the profiler records by default, and the operations it saw."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    activities = accelerator.run.hooks.profiler_activities(run=accelerator.run)
    with accelerator.profile() as profiler:
        (torch.ones(4, 4, device=accelerator.device) @ torch.ones(4, 4, device=accelerator.device)).sum()
    return [str(activity) for activity in activities], [event.key for event in profiler.key_averages()]


def test_the_profiler_records_what_torch_says_it_can(chips: Any) -> None:
    activities, events = chips.one(profiled)
    assert any("CPU" in activity for activity in activities)
    assert "aten::mm" in events


def exchange() -> list[Any]:
    """Point-to-point and the collectives that training does not use, straight from torch.distributed."""
    import torch.distributed as dist

    from drivetrain import Accelerator

    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    mine, other = torch.tensor([rank + 1.0], device=device), torch.zeros(1, device=device)
    for work in (dist.isend(mine, 1 - rank), dist.irecv(other, 1 - rank)):
        work.wait()
    parts = list(torch.arange(4.0, device=device).add(10 * rank).split(2))
    swapped = [torch.empty(2, device=device) for _ in parts]
    dist.all_to_all(swapped, parts)
    gathered = [torch.zeros(1, device=device) for _ in range(2)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    scattered = torch.zeros(2, device=device)
    dist.scatter(scattered, parts if rank == 0 else None, src=0)
    work = dist.all_reduce(mine, async_op=True)
    future = work.get_future().wait()
    return [
        other.tolist(),
        [one.tolist() for one in swapped],
        None if gathered is None else [one.tolist() for one in gathered],
        scattered.tolist(),
        str(future[0].device),
    ]


def test_the_vendors_collectives_work_beyond_what_training_needs(chips: Any) -> None:
    assert chips.two(exchange) == [
        [[2.0], [[0.0, 1.0], [10.0, 11.0]], [[1.0], [2.0]], [0.0, 1.0], "acme:0"],
        [[1.0], [[2.0, 3.0], [12.0, 13.0]], None, [2.0, 3.0], "acme:1"],
    ]


def wrapped_weights() -> tuple[str, str]:
    """Prepare a model whose weights are wrappers of other tensors; where its part lies, and what is in the wrapper."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    accelerator.backward(model(torch.ones(16, 16, device=accelerator.device)).sum())
    part = model[0].weight.to_local()
    names = part.__tensor_flatten__()[0]
    return str(part.device), str(getattr(part, names[0]).device)


def test_weights_that_wrap_others_are_moved_with_what_is_in_them(chips: Any) -> None:
    pytest.importorskip("torchao")
    found = chips.two(wrapped_weights, backend="fsdp", mixed_precision="fp8-torchao")
    assert found == [("acme:0", "acme:0"), ("acme:1", "acme:1")]
