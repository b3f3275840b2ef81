"""The runtime's world against the plan: what does not fit is refused with what was found and what fits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backends_xla.tests.recipes import BATCH, SAMPLES, WIDTH, data, net, parts, settings
from drivetrain.testing.logs import log_lines
from drivetrain.testing.pool import WorkerError
from drivetrain_xla.pairing import mismatch

Runner = Callable[..., Any]

pytestmark = pytest.mark.timeout(240)  # more than any process here is given

LIMIT = 220
"""Seconds for a process that imports the engine and compiles."""

needs_engine = pytest.mark.skipif(mismatch() is not None, reason="make test-xla has an environment with the pair")


def _world() -> dict[str, Any]:
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model, loader = accelerator.prepare(net(), DataLoader(data(), batch_size=BATCH))
    world = accelerator.run.world
    rows = [x.shape[0] for x, _ in loader]
    return {
        "size": world.size,
        "data_size": world.data_size,
        "feeds": world.feeds,
        "device": str(accelerator.device),
        "rows": rows,
        "total": loader.total_batch_size,
        "type": str(accelerator.distributed_type),
        "parameters": {str(parameter.device) for parameter in model.parameters()},
    }


def test_one_process_feeds_all_devices_of_a_mesh(on_a_mesh: Runner) -> None:
    found = on_a_mesh(_world, config=settings(spmd=True))
    assert (found["size"], found["data_size"], found["feeds"], found["total"]) == (1, 4, 4, 4 * BATCH)
    assert found["rows"] == [4 * BATCH] * (SAMPLES // (4 * BATCH))
    assert found["type"] == "XLA"
    assert found["parameters"] == {"xla:0"}


def test_devices_that_share_samples_are_no_data_shards(on_a_mesh: Runner) -> None:
    section = {"mesh": {"model": 2}, "partition": {"first.weight": ["model", None]}}
    found = on_a_mesh(_world, config=settings(spmd=True, **section))
    assert (found["size"], found["data_size"], found["feeds"]) == (1, 2, 2)


def test_one_device_is_a_world_of_one(on_one_device: Runner) -> None:
    found = on_one_device(_world, config=settings())
    assert (found["size"], found["data_size"], found["feeds"], found["device"]) == (1, 1, 1, "xla:0")


def _metrics() -> tuple[list[float], list[float]]:
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(11.0)), batch_size=BATCH))
    return accelerator.gather_for_metrics([x for (x,) in loader][-1]).tolist(), [
        value for (x,) in loader for value in accelerator.gather_for_metrics(x).tolist()
    ]


def test_metrics_see_each_sample_of_an_odd_number_once(on_a_mesh: Runner) -> None:
    _last, everything = on_a_mesh(_metrics, config=settings(spmd=True))
    assert everything == list(range(11))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(13.0))


def _streamed() -> list[float]:
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH))
    return [value for x in loader for value in accelerator.gather_for_metrics(x).tolist()]


def test_metrics_see_each_sample_of_a_stream_once(on_a_mesh: Runner) -> None:
    assert on_a_mesh(_streamed, config=settings(spmd=True)) == list(range(13))


def _drawn(folder: str) -> list[list[float]]:
    from drivetrain import Accelerator, set_seed

    accelerator = Accelerator()

    def draw() -> list[float]:
        return torch.rand(3, device=accelerator.device).tolist()

    set_seed(3)
    first, second = draw(), draw()
    set_seed(3)
    again = draw()
    accelerator.save_state(folder)
    next_one = draw()
    accelerator.load_state(folder)
    return [first, second, again, next_one, draw()]


def test_random_numbers_of_the_device_follow_the_seed_and_the_state(on_one_device: Runner, tmp_path: Path) -> None:
    first, second, again, next_one, loaded = on_one_device(_drawn, str(tmp_path / "state"), config=settings())
    assert first == again
    assert first != second
    assert second == next_one == loaded


def _held() -> dict[str, list[int]]:
    """Elements that each device holds of the first layer's weight, and of what the optimizer keeps for it."""
    import torch_xla
    from torch_xla.distributed.spmd import XLAShardedTensor

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    optimizer, _ = parts(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        accelerator.backward(model(torch.ones(4, WIDTH, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
    weight = model.first.weight
    kept = optimizer.state[weight]["exp_avg"]
    torch_xla.sync(wait=True)
    return {
        name: [shard.data.numel() for shard in XLAShardedTensor(tensor).local_shards]
        for name, tensor in (("weight", weight), ("exp_avg", kept))
    }


def test_each_device_holds_its_part_of_parameters_and_optimizer_state(on_a_mesh: Runner) -> None:
    whole = 32 * WIDTH
    found = on_a_mesh(_held, config=settings(spmd=True, mesh={"fsdp": 4}))
    assert found == {"weight": [whole // 4] * 4, "exp_avg": [whole // 4] * 4}
    assert on_a_mesh(_held, config=settings(spmd=True, mesh={"fsdp": 2}))["weight"] == [whole // 2] * 4


def _two_models() -> int:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(4, 4), net())
    return 1


def test_a_partition_may_be_about_one_of_several_models(on_a_mesh: Runner) -> None:
    section = {"mesh": {"model": 2}, "partition": {"first.weight": ["model", None]}}
    assert on_a_mesh(_two_models, config=settings(spmd=True, **section)) == 1


def _counted(steps: int) -> int:
    from drivetrain import Accelerator
    from drivetrain_xla.graphs import Graphs

    accelerator = Accelerator()
    model = net()
    optimizer, schedule = parts(model)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    graphs = Graphs(0)
    before = graphs.compiled
    for _ in range(steps):
        accelerator.backward(model(torch.ones(4, WIDTH, device=accelerator.device)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return graphs.compiled - before


def test_steps_of_one_shape_share_their_graphs_whatever_the_learning_rate(on_one_device: Runner) -> None:
    assert on_one_device(_counted, 12, config=settings()) <= 3


class Sentences(torch.utils.data.Dataset):
    """Each of another length."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2 + index)


def _ragged() -> list[str]:
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Embedding(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Sentences()))
    with log_lines("drivetrain.xla") as told:
        for x in loader:
            accelerator.backward(model(x.long()).sum())
            optimizer.step()
            optimizer.zero_grad()
    return told


def test_batches_that_change_their_shape_are_warned_of_once(on_one_device: Runner) -> None:
    (told,) = on_one_device(_ragged, config=settings())
    assert "graphs were compiled anew" in told
    assert "Pad in the collate function" in told


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"spmd": True, "mesh": {"fsdp": 3}}, r"does not make 4 device"),
        ({"spmd": True, "runtime": "TPU"}, "xla.runtime is TPU, and the environment variable PJRT_DEVICE is CPU"),
        ({"spmd": True, "runtime": "CPU", "cpu_devices": 2}, "xla.cpu_devices is 2, and the runtime has 4"),
        ({"spmd": True, "mesh": {"model": 2}, "partition": {"nothing": ["model"]}}, "'nothing' matches no parameter"),
        ({"spmd": True, "mesh": {"model": 2}, "partition": {"first.weight": ["model"]}}, "names 1 axes"),
        ({"spmd": True, "mesh": {"fsdp": 4}, "fsdp_blocks": ["Block"]}, "Net has no Block; it has Linear, Net"),
    ],
)
def test_a_section_that_does_not_fit_the_devices_or_the_model_is_refused(
    on_a_mesh: Runner, section: dict[str, Any], words: str
) -> None:
    on_a_mesh(_world, config=settings(spmd=True))
    with pytest.raises(WorkerError, match=words):
        on_a_mesh(_world, config=settings(**section))


def _back_from_spmd() -> None:
    from drivetrain import Accelerator
    from drivetrain_xla import XlaConfig
    from drivetrain_xla.runtime import start

    Accelerator()
    start(XlaConfig())


def test_a_process_does_not_go_back_from_spmd(on_a_mesh: Runner) -> None:
    with pytest.raises(WorkerError, match="computes by SPMD already"):
        on_a_mesh(_back_from_spmd, config=settings(spmd=True))


@pytest.mark.parametrize("more", [{"device": "cuda"}, {"gpu_ids": [0]}, {"mixed_precision": "fp16"}])
def test_a_setting_that_would_not_be_followed_is_refused(on_a_mesh: Runner, more: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match=next(iter(more))):
        on_a_mesh(_world, config=settings(spmd=True) | more)


# ------------------------------------------------------------------------------------------------ in fresh processes


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT_", "CPU_NUM", "DRIVETRAIN_"))}
    return subprocess.run(
        [str(each) for each in command], env=environment | variables, capture_output=True, text=True, timeout=LIMIT
    )


@needs_engine
def test_two_worlds_of_one_are_refused(tmp_path: Path) -> None:
    """What a launcher that knows nothing of the runtime starts."""
    script = tmp_path / "train.py"
    script.write_text("from drivetrain import Accelerator\nAccelerator()\n")
    config = tmp_path / "config.yaml"
    config.write_text("backend: xla\n")
    foreign = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "DRIVETRAIN_CONFIG": str(config),
    }
    found = run(sys.executable, script, **foreign)
    assert found.returncode == 1
    assert "planned 2 process(es), and the CPU runtime is a world of 1 with 1 device(s)" in found.stderr
    assert "num_processes: 1 is what fits" in found.stderr


@needs_engine
@pytest.mark.parametrize("options", [[], ["--set", "xla.spmd=true", "--set", "xla.cpu_devices=4"]])
def test_the_unchanged_script_is_launched_on_one_device_and_on_a_mesh(tmp_path: Path, options: list[str]) -> None:
    script = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
    chosen = ["--backend", "xla", "--set", "xla.runtime=CPU", *options]
    found = run(sys.executable, "-m", "drivetrain", "launch", *chosen, script, "--epochs", "2")
    assert found.returncode == 0, found.stderr
    assert float(found.stdout.rpartition("test accuracy: ")[2]) > 0.8
    assert "graphs compiled" in found.stderr


@needs_engine
def test_several_processes_on_a_runtime_that_is_one_are_refused_before_any_starts() -> None:
    found = run(
        sys.executable,
        "-m",
        "drivetrain",
        "launch",
        "--backend",
        "xla",
        "--set",
        "xla.runtime=CPU",
        "--num_processes",
        "2",
        __file__,
    )
    assert found.returncode != 0
    assert "2 processes are asked for, but the runtime CPU is one process" in found.stderr
