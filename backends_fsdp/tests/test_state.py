"""State of sharded runs: saved in pieces or whole, loaded on other worlds and backends, equal to the unbroken run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from backends_fsdp.tests.recipes import BOTH, CLASSES, WIDTH
from drivetrain.testing.pool import WorkerError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Counted(nn.Module):
    """State that is no tensor, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Net(nn.Module):
    """A scalar, a tie, buffers, a frozen part and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].inner.weight = self.blocks[0].inner.weight
        self.counted = Counted()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.counted(x)) * self.scale


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 5, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


def optimizers(model: Net) -> list[torch.optim.Optimizer]:
    first = torch.optim.AdamW([{"params": model.blocks.parameters(), "lr": 0.02}, {"params": [model.scale]}], lr=0.01)
    return [first, torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)]


def settings(backend: str, **section: Any) -> dict[str, Any]:
    section = {"transformer_classes": "Block", **section} if backend.startswith("fsdp") else section
    return {"backend": backend, "device": "cpu", **({backend: section} if section else {})}


def same_batch_steps(accelerator: Any, model: nn.Module, chosen: list[Any], start: int, count: int) -> list[float]:
    """Every rank trains on the same rows, so that the number of ranks does not matter."""
    losses = []
    for step in range(start, start + count):
        x, y = batch(step)
        loss = cross_entropy(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def start(seed: int) -> tuple[Any, nn.Module, list[Any]]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net(seed)
    model, *chosen = accelerator.prepare(model, *optimizers(model))
    return accelerator, model, chosen


def save(directory: str) -> list[float]:
    """Three steps, a save, and what the unbroken run goes on with."""
    accelerator, model, chosen = start(0)
    same_batch_steps(accelerator, model, chosen, 0, 3)
    model.eval()
    with torch.no_grad():
        model(batch(0)[0])
    model(batch(0)[0])  # and no backward: gathered parameters are left behind, which no optimizer knows
    model.train()
    accelerator.save_state(directory)
    return same_batch_steps(accelerator, model, chosen, 3, 3)


def load(directory: str, evaluate_first: bool = False) -> tuple[list[float], int]:
    accelerator, model, chosen = start(1)
    chosen[0].param_groups[0]["lr"] = 9.0
    if evaluate_first:  # leaves gathered parameters behind, which must not survive the loading
        with torch.no_grad():
            model.eval()
            model(batch(0)[0])
            model.train()
    accelerator.load_state(directory)
    losses = same_batch_steps(accelerator, model, chosen, 3, 3)
    return losses, accelerator.unwrap_model(model).counted.seen


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("kind", ["sharded", "full"])
@BOTH
def test_a_loaded_run_goes_on_as_the_unbroken_one(worker_pool: Any, tmp_path: Path, backend: str, kind: str) -> None:
    config = settings(backend, state_dict_type=kind)
    unbroken = worker_pool(2).run(save, str(tmp_path / "state"), config=config)
    loaded = worker_pool(2).run(load, str(tmp_path / "state"), True, config=config)
    assert [losses for losses, _ in loaded] == unbroken
    assert [seen for _, seen in loaded] == [8, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("fsdp", 2, {}), ("fsdp", 4, {})),
        (("fsdp", 4, {}), ("fsdp", 3, {"wrap_policy": "none", "transformer_classes": None})),
        (("fsdp1", 3, {}), ("fsdp1", 2, {"wrap_policy": "none", "transformer_classes": None})),
        (("fsdp1", 2, {"sharding_strategy": "no_shard"}), ("fsdp", 3, {})),
        (("fsdp", 4, {"replicate_size": 2}), ("fsdp1", 2, {})),
        (("fsdp", 2, {"state_dict_type": "full"}), ("ddp", 2, {})),
        (("fsdp1", 2, {"state_dict_type": "full"}), ("single", 1, {})),
        (("fsdp", 3, {}), ("ddp", 2, {})),
        (("fsdp1", 2, {}), ("single", 1, {})),
        (("ddp", 2, {}), ("fsdp", 2, {})),
        (("single", 1, {}), ("fsdp1", 3, {})),
    ],
    ids=str,
)
def test_a_state_is_loaded_by_other_worlds_and_backends(
    worker_pool: Any, tmp_path: Path, saved_by: Any, loaded_by: Any
) -> None:
    backend, ranks, section = saved_by
    unbroken = worker_pool(ranks).run(save, str(tmp_path / "state"), config=settings(backend, **section))
    backend, ranks, section = loaded_by
    loaded = worker_pool(ranks).run(load, str(tmp_path / "state"), config=settings(backend, **section))
    for losses, _ in loaded:
        torch.testing.assert_close(losses, unbroken[0], rtol=1e-5, atol=1e-6)


def test_each_rank_writes_its_pieces_and_nothing_is_pickled(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(4).run(save, str(tmp_path / "state"), config=settings("fsdp", replicate_size=2))
    directory = tmp_path / "state"
    files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    assert {Path(name).suffix for name in files} == {".json", ".safetensors"}
    # The second replica holds the same pieces, so it writes none.
    assert [name for name in files if name.startswith("models")] == [
        "models/0/rank_00000.safetensors",
        "models/0/rank_00001.safetensors",
        "models/0/sharded.json",
    ]
    pieces = [load_file(directory / f"models/0/rank_0000{rank}.safetensors") for rank in range(2)]
    assert [piece["head.weight"].numel() for piece in pieces] == [2 * WIDTH, WIDTH]
    assert "scale" in pieces[0]
    assert "scale" not in pieces[1]
    index = json.loads((directory / "models/0/sharded.json").read_text())
    assert index["others"]["aliases"] == {"blocks.1.inner.weight": "blocks.0.inner.weight"}
    assert index["tensors"]["head.weight"]["parts"] == [[0, 12, 0], [12, 18, 1]]


# ------------------------------------------------------------------------------------------------------- whole weights


def without_extra(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


class Plain(Net):
    """Without the state that weight files can't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = nn.Identity()


def save_plain_models(directory: str) -> Any:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = accelerator.prepare(Plain())
    accelerator.save_model(model, f"{directory}/prepared")
    accelerator.save_model(accelerator.unwrap_model(model), f"{directory}/unwrapped")
    return isinstance(accelerator.unwrap_model(model), Plain), list(
        dict(accelerator.unwrap_model(model).named_parameters())
    )


@BOTH
def test_save_model_writes_the_bytes_of_the_unwrapped_and_of_a_single_process(
    worker_pool: Any, tmp_path: Path, backend: str
) -> None:
    found = worker_pool(2).run(save_plain_models, str(tmp_path / backend), config=settings(backend))
    worker_pool(1).run(save_plain_models, str(tmp_path / "single"), config=settings("single"))
    files = [
        (tmp_path / where / "model.safetensors").read_bytes()
        for where in (f"{backend}/prepared", f"{backend}/unwrapped", "single/prepared")
    ]
    assert files[0] == files[1] == files[2]
    torch.manual_seed(0)
    assert found[0][0]
    assert set(found[0][1]) == {name for name, _ in Plain().named_parameters()}


def full_states(steps: int) -> Any:
    accelerator, model, chosen = start(0)
    same_batch_steps(accelerator, model, chosen, 0, steps)
    hooks, run = accelerator.run.hooks, accelerator.run
    states = [hooks.optimizer_state(run=run, optimizer=one.optimizer, models=[model]) for one in chosen]
    return accelerator.get_state_dict(model), states


@pytest.mark.parametrize(("backend", "ranks"), [("fsdp", 2), ("fsdp", 3), ("fsdp1", 2), ("fsdp1", 3)])
def test_full_states_equal_those_of_one_process(worker_pool: Any, backend: str, ranks: int) -> None:
    [(weights, states)] = worker_pool(1).run(full_states, 2, config=settings("single"))
    found = worker_pool(ranks).run(full_states, 2, config=settings(backend))
    assert set(found[0][0]) == set(weights)
    torch.testing.assert_close(without_extra(found[0][0]), without_extra(weights), rtol=1e-5, atol=1e-6)
    assert found[0][0]["counted._extra_state"] == weights["counted._extra_state"]
    for mine, theirs in zip(found[0][1], states, strict=True):
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, entries in theirs["state"].items():
            torch.testing.assert_close(mine["state"][number], entries, rtol=1e-4, atol=1e-7)
    assert all(weights == {} and all(not state["state"] for state in states) for weights, states in found[1:])


# -------------------------------------------------------------------------------------------------------- what can't be


def save_and_change(directory: str, change: str) -> None:
    accelerator, model, chosen = start(0)
    same_batch_steps(accelerator, model, chosen, 0, 1)
    accelerator.save_state(directory)
    accelerator.wait_for_everyone()
    index = Path(directory, "models/0/sharded.json")
    if change == "shape" and accelerator.is_main_process:
        text = json.loads(index.read_text())
        text["tensors"]["head.bias"]["shape"] = [3, 1]
        index.write_text(json.dumps(text))
        manifest = Path(directory, "manifest.json")
        listing = json.loads(manifest.read_text())
        import zlib

        listing["files"]["models/0/sharded.json"] = {
            "size": index.stat().st_size,
            "crc32": f"{zlib.crc32(index.read_bytes()):08x}",
        }
        manifest.write_text(json.dumps(listing))
    if change == "missing" and accelerator.is_last_process:
        Path(directory, "models/0/rank_00001.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "message"), [("shape", "head.bias is of shape"), ("missing", r"rank_00001\.safetensors can't be found")]
)
@BOTH
def test_a_state_that_does_not_fit_is_the_same_error_on_all_ranks(
    worker_pool: Any, tmp_path: Path, backend: str, change: str, message: str
) -> None:
    worker_pool(2).run(save_and_change, str(tmp_path / "state"), change, config=settings(backend))
    with pytest.raises(WorkerError, match=message) as caught:
        worker_pool(2).run(load, str(tmp_path / "state"), config=settings(backend))
    assert len({error.message for error in caught.value.errors}) == 1
    assert len(caught.value.errors) == 2


def save_on_each_node(directory: str) -> None:
    from drivetrain import Accelerator, ProjectConfiguration

    accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
    accelerator.prepare(net())
    accelerator.save_state(directory)


def test_pieces_on_storage_that_is_not_shared_are_refused(worker_pool: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="needs storage that all machines share"):
        worker_pool(2).run(save_on_each_node, str(tmp_path / "state"), config=settings("fsdp"))


def continue_a_scaler(directory: str) -> tuple[float, float]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, *chosen = accelerator.prepare(model, *optimizers(model))
    same_batch_steps(accelerator, model, chosen, 0, 2)
    accelerator.save_state(directory)
    before = accelerator.scaler.get_scale()
    accelerator.scaler.update(3.0)
    accelerator.load_state(directory)
    return before, accelerator.scaler.get_scale()


@BOTH
def test_the_loss_scale_is_part_of_the_state(worker_pool: Any, tmp_path: Path, backend: str) -> None:
    config = {**settings(backend), "mixed_precision": "fp16", "fp16": {"init_scale": 64.0}}
    assert worker_pool(2).run(continue_a_scaler, str(tmp_path / "state"), config=config) == [(64.0, 64.0)] * 2
