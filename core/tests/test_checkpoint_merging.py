"""`drivetrain merge-weights` of checkpoints that one process saved; sharding backends test their pieces themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import nn

from core.tests.checkpoints import filled, simple
from drivetrain.cli import main


def merge(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["merge-weights", *map(str, arguments)])


class Counted(nn.Linear):
    """State that is no tensor, and two names for one bias."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.twin = nn.Linear(3, 3)
        self.twin.bias = self.bias

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    simple(filled(2.0)).save_state(tmp_path / "state")
    return tmp_path / "state"


def test_the_files_are_those_of_save_model(saved: Path, tmp_path: Path) -> None:
    done = merge(saved, tmp_path / "merged")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"model 0 (Linear): wrote {tmp_path / 'merged/model.safetensors'}\n"
    accelerator = simple(filled(2.0))
    accelerator.save_model(accelerator.known.wrapped_models[0], tmp_path / "right")
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["model.safetensors"]
    merged, right = (tmp_path / name / "model.safetensors" for name in ("merged", "right"))
    assert merged.read_bytes() == right.read_bytes()


def test_several_models_get_a_directory_each(tmp_path: Path) -> None:
    simple(filled(1.0), filled(2.0, 3, 1)).save_state(tmp_path / "state")
    assert merge(tmp_path / "state", tmp_path / "out").exit_code == 0
    assert load_file(tmp_path / "out/0/model.safetensors")["weight"].tolist() == [[1.0, 1.0]] * 2
    assert load_file(tmp_path / "out/1/model.safetensors")["weight"].tolist() == [[2.0] * 3]


def test_ties_stay_and_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    model = Counted()
    simple(model).save_state(tmp_path / "state")
    done = merge(tmp_path / "state", tmp_path / "out", "--unsafe-serialization")
    assert done.exit_code == 0
    assert "left out, since it is no tensor: _extra_state" in done.stderr
    found = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert set(found) == {"weight", "bias", "twin.weight", "twin.bias"}
    assert found["bias"] is found["twin.bias"]
    assert torch.equal(found["twin.weight"], model.twin.weight)


@pytest.mark.parametrize("spelling", ["--max_shard_size", "--max-shard-size"])
def test_files_are_as_large_as_asked_for(saved: Path, tmp_path: Path, spelling: str) -> None:
    done = merge(saved, tmp_path / "out", spelling, "16")
    assert done.exit_code == 0
    assert (
        done.stdout == f"model 0 (Linear): wrote 2 files, listed in {tmp_path / 'out/model.safetensors.index.json'}\n"
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)} | {"model.safetensors.index.json"}


def test_model_files_that_are_there_are_replaced_only_when_told_to(saved: Path, tmp_path: Path) -> None:
    assert merge(saved, tmp_path / "out", "--max_shard_size", "16").exit_code == 0
    (tmp_path / "out" / "notes.txt").write_text("of the user")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    done = merge(saved, tmp_path / "out")
    assert done.exit_code == 1
    assert f"Error: {tmp_path / 'out'} has model-00001-of-00002.safetensors, model-00002" in done.stderr
    assert "--overwrite" in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert merge(saved, tmp_path / "out", "--overwrite").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "notes.txt"]


def test_of_several_models_none_is_written_where_one_would_be_replaced(tmp_path: Path) -> None:
    simple(filled(1.0), filled(2.0)).save_state(tmp_path / "state")
    (tmp_path / "out" / "1").mkdir(parents=True)
    (tmp_path / "out" / "1" / "model.safetensors").write_text("of the user")
    done = merge(tmp_path / "state", tmp_path / "out")
    assert f"{tmp_path / 'out/1'} has model.safetensors already" in done.stderr
    assert not (tmp_path / "out" / "0").exists()


def test_a_model_that_a_hook_saved_is_left_out_and_said_so(tmp_path: Path) -> None:
    accelerator = simple(filled(1.0), filled(2.0))
    accelerator.register_save_state_pre_hook(lambda models, weights, where: weights.pop(0))
    accelerator.save_state(tmp_path / "state")
    done = merge(tmp_path / "state", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (
        0,
        "model 0 (Linear): left out, since a save_state pre-hook of the script saved it\n",
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["1"]


def test_what_is_not_there_or_not_whole_is_named(saved: Path, tmp_path: Path) -> None:
    done = merge(tmp_path / "other", tmp_path / "out")
    assert done.exit_code == 1
    assert f"Error: {tmp_path / 'other'} does not exist; checkpoints beside it: state" in done.stderr
    done = merge(saved, saved / "models/0")
    assert "inside the checkpoint" in done.stderr
    done = merge(saved, tmp_path / "out", "--max_shard_size", "much")
    assert (done.exit_code, "'much' is no size" in done.stderr) == (2, True)
    (saved / "models/0/model.safetensors").write_bytes(b"x")
    done = merge(saved, tmp_path / "out")
    assert "model.safetensors is damaged: it has 1 bytes" in done.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_changed_on_the_disk_are_refused(tmp_path: Path) -> None:
    accelerator = simple()
    accelerator.prepare(torch.nn.Linear(8, 8))
    accelerator.save_state(tmp_path / "state")
    (file,) = (tmp_path / "state").rglob("model.safetensors")
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)
    done = merge(tmp_path / "state", tmp_path / "out")
    assert done.exit_code == 1
    assert "model.safetensors is damaged" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_models_has_no_weights(tmp_path: Path) -> None:
    simple().save_state(tmp_path / "state")
    done = merge(tmp_path / "state", tmp_path / "out")
    assert done.exit_code == 1
    assert "has no weights: no model was prepared" in done.stderr
