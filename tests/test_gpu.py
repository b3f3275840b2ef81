"""On one GPU: the same promises as on the CPU. `make test-gpu` runs these; without a GPU each is skipped, visibly."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.timeout(120),
]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))


def train(**arguments: Any) -> dict[str, Any]:
    """Two epochs; the loss of every update, final weights, and facts on the device."""
    from drivetrain import Accelerator

    accelerator = Accelerator(**arguments)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for x, y in loader:
            assert x.device == accelerator.device
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return {
        "losses": losses,
        "weights": [p.detach().cpu() for p in accelerator.unwrap_model(model).parameters()],
        "device": str(accelerator.device),
        "scale": None if accelerator.scaler is None else accelerator.scaler.get_scale(),
        "memory": accelerator.run.hooks.memory(run=accelerator.run),
    }


def oracle() -> tuple[list[float], list[torch.Tensor]]:
    """Plain torch on the GPU."""
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=16):
            loss = cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


def assert_as_plain_torch(outcome: dict[str, Any], tolerance: float) -> None:
    losses, weights = oracle()
    assert outcome["losses"] == pytest.approx(losses, rel=tolerance, abs=tolerance)
    for ours, plain in zip(outcome["weights"], weights, strict=True):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def test_one_process_equals_plain_torch(worker_pool: Any) -> None:
    (outcome,) = worker_pool(1).run(train, timeout=60)
    assert outcome["device"] == "cuda:0"
    assert outcome["memory"]["peak"] >= outcome["memory"]["allocated"] > 0
    assert_as_plain_torch(outcome, 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_near_plain_torch(worker_pool: Any, precision: str) -> None:
    (outcome,) = worker_pool(1).run(train, timeout=60, config={"mixed_precision": precision})
    assert (outcome["scale"] is not None) == (precision == "fp16")
    losses, _ = oracle()
    assert outcome["losses"] == pytest.approx(losses, abs=0.05)


def test_two_ranks_on_one_gpu_equal_plain_torch(worker_pool: Any) -> None:
    config = {"gpu_ids": [0, 0], "collectives": "gloo", "collective_timeout": 15}
    outcomes = worker_pool(2).run(train, timeout=60, config=config)
    assert [outcome["device"] for outcome in outcomes] == ["cuda:0", "cuda:0"]
    assert_as_plain_torch(outcomes[0], 1e-4)


def collectives_of_one() -> tuple[str | None, list[float]]:
    """The ddp backend's own process group on NCCL, with nobody else in it."""
    from drivetrain import defaults
    from drivetrain.binding import Hooks, Origin
    from drivetrain.builtin import No, TorchDevice
    from drivetrain.config import resolve
    from drivetrain.world import Run, Topology
    from drivetrain_ddp import Ddp

    hooks, backend = Hooks(defaults), Ddp()
    for role, plugin in (("backend", backend), ("device", TorchDevice()), ("precision", No())):
        hooks.register(plugin, Origin(role, role))
    topology, config = Topology(), resolve(environment={}).run
    device = hooks.device(topology=topology)
    library = hooks.collectives(device_type=device.type)
    world = hooks.init_world(config=config, topology=topology, device=device, collectives=library)
    run = Run(
        config=config,
        topology=topology,
        world=world,
        policy=hooks.plugin("precision").policy,
        capabilities=backend.capabilities,
        names={"backend": "ddp", "device": "torch", "precision": "no"},
        hooks=hooks,
    )
    model = hooks.wrap_model(run=run, model=nn.Linear(2, 1).to(device))
    model(torch.ones(1, 2, device=device)).sum().backward()
    gathered = hooks.all_gather(run=run, tensor=next(model.parameters()).grad, group=None)
    hooks.shutdown(run=run, error=None)
    return world.collectives, gathered.flatten().tolist()


def test_a_process_group_of_one_on_nccl(worker_pool: Any) -> None:
    ((library, gradients),) = worker_pool(1).run(collectives_of_one, timeout=60)
    assert library is not None
    assert "nccl" in library
    assert gradients == [1.0, 1.0]


def untouched() -> tuple[bool, bool]:
    """Whether CUDA is initialised after the import, and after the Accelerator."""
    import drivetrain

    accelerator_class = drivetrain.Accelerator
    before = torch.cuda.is_initialized()
    accelerator_class().prepare(net())
    return before, torch.cuda.is_initialized()


def test_nothing_touches_the_gpu_before_the_accelerator() -> None:
    from drivetrain.testing.pool import WorkerPool

    environment = {key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ}
    with WorkerPool(1, environment) as pool:
        assert pool.run(untouched, timeout=60) == [(False, True)]
