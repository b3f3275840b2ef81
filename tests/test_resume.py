"""Saving and resuming on several ranks: bit by bit, with another number of ranks, and when one rank fails."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

Pool = Callable[[int], Any]
STEPS = 14


class Tally:
    """Counts samples; a stand-in for what users register."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Trainer:
    """``seed`` decides all that a checkpoint must bring back."""

    def __init__(self, seed: int, rows: int = 22, **options: Any) -> None:
        from drivetrain import Accelerator, set_seed

        self.accelerator = Accelerator(cpu=True, **options)
        set_seed(seed, device_specific=True)
        inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2, shuffle=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = LinearLR(optimizer, total_iters=50)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.tally = Tally()
        self.accelerator.register_for_checkpointing(self.tally)

    def train(self, steps: int, after: Callable[[int], Any] = lambda step: None) -> list[Any]:
        seen: list[Any] = []
        while self.accelerator.step < steps:
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.optimizer.zero_grad()
                    loss = F.mse_loss(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                self.tally.samples += len(inputs)
                weights = [parameter.tolist() for parameter in self.model.parameters()]
                draws = (random.random(), float(torch.rand(())))
                seen.append((loss.item(), inputs.tolist(), weights, self.scheduler.get_last_lr(), draws))
                after(self.accelerator.step)
                if self.accelerator.step == steps:
                    break
        return seen


def train_and_save(directory: str, options: dict[str, Any]) -> list[Any]:
    trainer = Trainer(1, **options)
    return trainer.train(STEPS, lambda step: trainer.accelerator.save_state(Path(directory) / str(step)))


def load_and_train(directory: str, step: int, options: dict[str, Any]) -> list[Any]:
    trainer = Trainer(2, **options)
    trainer.accelerator.load_state(Path(directory) / str(step))
    assert trainer.accelerator.step == step
    return trainer.train(STEPS)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_two_ranks_go_on_bit_by_bit_inside_groups_and_epochs(worker_pool: Pool, tmp_path: Path, precision: str) -> None:
    ranks = worker_pool(2)
    options = {"gradient_accumulation_steps": 4, "mixed_precision": precision}
    whole = ranks.run(train_and_save, str(tmp_path), options, timeout=60)
    assert whole[0] != whole[1]
    for step in (2, 3, 4, 6, 9):  # inside a group, before and at its end, at an epoch's end, in the second epoch
        resumed = ranks.run(load_and_train, str(tmp_path), step, options)
        assert resumed == [seen[step:] for seen in whole], f"after micro-batch {step}"


def test_what_is_common_is_there_once_and_what_is_a_ranks_own_for_each(worker_pool: Pool, tmp_path: Path) -> None:
    worker_pool(2).run(train_and_save, str(tmp_path), {"gradient_accumulation_steps": 4}, timeout=60)
    there = {path.relative_to(tmp_path / "7").as_posix() for path in (tmp_path / "7").rglob("*") if path.is_file()}
    own = {f"{name}/rank_0000{rank}" for name in ("rng", "loaders/0", "gradients") for rank in (0, 1)}
    assert {name.rpartition(".")[0] for name in there if "rank" in name} == own
    assert {name for name in there if "rank" not in name} == {
        "manifest.json",
        "models/0/model.safetensors",
        "optimizers/0/state.json",
        "optimizers/0/state.safetensors",
        "schedulers/0.json",
        "custom/0.json",
        "accumulation.json",
    }
    manifest = json.loads((tmp_path / "7/manifest.json").read_text())
    assert set(manifest["files"]) == there - {"manifest.json"}
    assert (manifest["processes"], manifest["data_size"], manifest["backend"]) == (2, 2, "ddp")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# ------------------------------------------------------------------------------------------- another number of ranks


def state_after_loading(directory: str, step: int, rows: int) -> Any:
    trainer = Trainer(2, rows)
    trainer.accelerator.load_state(Path(directory) / str(step))
    draws = (random.random(), float(torch.rand(())))
    samples = [row for inputs, _ in trainer.loader for row in inputs.tolist()]
    moments = [state["exp_avg"].tolist() for state in trainer.optimizer.state.values()]
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    weights = {name: tensor.tolist() for name, tensor in state.items()}
    return {"weights": weights, "moments": moments, "samples": samples, "draws": draws, "tally": trainer.tally.samples}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_everything_but_new_ranks_generators(
    worker_pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    """24 rows, so that no round is completed; saved after four micro-batches of ``before`` ranks."""
    worker_pool(before).run(_save_at, str(tmp_path), 4, timeout=60)
    same = worker_pool(before).run(state_after_loading, str(tmp_path), 4, 24)
    other = worker_pool(after).run(state_after_loading, str(tmp_path), 4, 24)
    for name in ("weights", "moments", "tally"):
        assert all(found[name] == same[0][name] for found in other)
    rest = sorted(row for found in same for row in found["samples"])
    assert sorted(row for found in other for row in found["samples"]) == rest
    assert len(rest) == 24 - 4 * 2 * before
    assert other[0]["draws"] == same[0]["draws"]
    if after == 2:
        assert other[1]["draws"] != other[0]["draws"]
        assert worker_pool(2).run(state_after_loading, str(tmp_path), 4, 24)[1]["draws"] == other[1]["draws"]


def _save_at(directory: str, step: int) -> None:
    trainer = Trainer(1, 24)
    trainer.train(step)
    trainer.accelerator.save_state(Path(directory) / str(step))


def test_a_position_inside_a_round_is_refused_with_the_way_out(worker_pool: Pool, tmp_path: Path) -> None:
    worker_pool(1).run(_save_at, str(tmp_path), 3, timeout=60)
    texts = worker_pool(2).run(error_of_loading, str(tmp_path / "3"))
    assert texts[0] == texts[1]
    assert "loader 0: the state was saved after 6 samples" in texts[0]
    assert "strict=False" in texts[0]


def error_of_loading(directory: str) -> str:
    from drivetrain.errors import CheckpointError

    trainer = Trainer(2, 24)
    before = [parameter.tolist() for parameter in trainer.model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        trainer.accelerator.load_state(directory)
    assert [parameter.tolist() for parameter in trainer.model.parameters()] == before
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ one rank that fails


class FailsOnOneRank(Tally):
    def __init__(self, rank: int, failing: int) -> None:
        super().__init__()
        self.fails = rank == failing

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OSError(28, "No space left on device", "a temporary file")
        return super().state_dict()


def error_of_saving(directory: str, failing: int) -> str:
    from drivetrain.errors import CheckpointError

    trainer = Trainer(1)
    trainer.accelerator.register_for_checkpointing(FailsOnOneRank(trainer.accelerator.process_index, failing))
    with pytest.raises(CheckpointError) as caught:
        trainer.accelerator.save_state(directory)
    trainer.accelerator.wait_for_everyone()
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_can_not_save_is_an_error_on_all_and_leaves_nothing(
    worker_pool: Pool, tmp_path: Path, failing: int
) -> None:
    texts = worker_pool(2).run(error_of_saving, str(tmp_path / "c"), failing)
    assert texts[0] == texts[1]
    assert f"failed on rank {failing}: No space left on device: a temporary file" in texts[0]
    assert not any(tmp_path.iterdir())


def full_disk_on_one_rank(directory: str, failing: int) -> str:
    import resource

    from drivetrain.errors import CheckpointError

    trainer = Trainer(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.accelerator.process_index == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            trainer.accelerator.save_state(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(worker_pool: Pool, tmp_path: Path, failing: int) -> None:
    texts = worker_pool(2).run(full_disk_on_one_rank, str(tmp_path / "c"), failing)
    assert texts[0] == texts[1]
    assert f"failed on rank {failing}: can't write" in texts[0]
    assert "File too large" in texts[0]
    assert not any(tmp_path.iterdir())


def error_of_looking_at(directory: str) -> list[str]:
    from drivetrain.errors import CheckpointError

    trainer = Trainer(1)
    texts = []
    for method in (trainer.accelerator.save_state, trainer.accelerator.load_state):
        with pytest.raises(CheckpointError) as caught:
            method(directory)
        texts.append(str(caught.value))
    return texts


@pytest.mark.slow
def test_a_place_that_can_not_even_be_looked_at_is_an_error_on_all(worker_pool: Pool, tmp_path: Path) -> None:
    """The main process alone looks for what earlier saves left."""
    texts = worker_pool(2).run(error_of_looking_at, str(tmp_path / ("long" * 100) / "c"))
    assert texts[0] == texts[1]
    assert all("File name too long" in text for text in texts[0])


def test_a_file_that_one_rank_misses_is_an_error_on_all_and_nothing_is_loaded(
    worker_pool: Pool, tmp_path: Path
) -> None:
    worker_pool(2).run(_save_at, str(tmp_path), 2, timeout=60)
    (tmp_path / "2/rng/rank_00001.json").unlink()
    texts = worker_pool(2).run(error_of_loading, str(tmp_path / "2"))
    assert texts[0] == texts[1]
    assert "rng/rank_00001.json can't be found" in texts[0]


# ---------------------------------------------------------------------------------------------------------- the rest


def hooks_on_the_main_process(directory: str) -> Any:
    trainer = Trainer(1)
    accelerator, model = trainer.accelerator, trainer.model

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            accelerator.save(weights.pop(), Path(output_dir) / "own.safetensors")

    def load(models: list[Any], input_dir: str) -> None:
        from safetensors.torch import load_file

        accelerator.unwrap_model(models.pop()).load_state_dict(load_file(Path(input_dir) / "own.safetensors"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(directory)
    before = [parameter.tolist() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(directory)
    return before == [parameter.tolist() for parameter in model.parameters()]


def test_hooks_that_take_weights_out_on_the_main_process_alone(worker_pool: Pool, tmp_path: Path) -> None:
    assert worker_pool(2).run(hooks_on_the_main_process, str(tmp_path / "c")) == [True, True]
    assert not (tmp_path / "c/models").exists()


def weights_from_the_main_process_alone(directory: str) -> list[str]:
    trainer = Trainer(1)
    if trainer.accelerator.is_main_process:
        trainer.accelerator.save_model(trainer.model, directory)
    trainer.accelerator.wait_for_everyone()
    return list(trainer.accelerator.get_state_dict(trainer.model))


def test_weights_have_the_users_names_and_need_no_other_rank(worker_pool: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    names = worker_pool(2).run(weights_from_the_main_process_alone, str(tmp_path))
    assert names[0] == names[1] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(names[0])


def two_machines(directory: str, save_on_each_node: bool) -> Any:
    """Each rank is a machine of its own, and sees a directory the other does not."""
    from drivetrain import ProjectConfiguration
    from drivetrain.errors import CheckpointError

    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    project = ProjectConfiguration(
        project_dir=Path(directory) / f"machine{rank}",
        automatic_checkpoint_naming=True,
        save_on_each_node=save_on_each_node,
    )
    trainer = Trainer(1, project_config=project)
    try:
        whole = trainer.train(6, lambda step: step == 3 and trainer.accelerator.save_state())
    except CheckpointError as error:
        return str(error)
    trainer.accelerator.load_state()
    return trainer.train(6) == whole[3:]


def test_machines_with_storage_of_their_own_each_keep_a_checkpoint(worker_pool: Pool, tmp_path: Path) -> None:
    assert worker_pool(2).run(two_machines, str(tmp_path), True) == [True, True]
    for rank in (0, 1):
        directory = tmp_path / f"machine{rank}/checkpoints/checkpoint_0"
        assert (directory / "models/0/model.safetensors").exists()
        assert [path.name for path in (directory / "loaders/0").iterdir()] == [f"rank_0000{rank}.json"]


def test_machines_that_should_share_storage_and_do_not_are_told(worker_pool: Pool, tmp_path: Path) -> None:
    texts = worker_pool(2).run(two_machines, str(tmp_path), False)
    assert "not the same directory on all machines" in texts[0]
    assert "save_on_each_node=True" in texts[1]
    assert not list(tmp_path.rglob("*.json"))
