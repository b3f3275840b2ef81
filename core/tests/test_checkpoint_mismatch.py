"""A checkpoint that does not fit or is damaged: named, and nothing loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from core.tests.checkpoints import filled, simple, value
from drivetrain import Accelerator, state
from drivetrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")


class Meter:
    def __init__(self, total: Any = 0) -> None:
        self.total = total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


# ---------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: [filled(0.0)],
            r"this run has 1 \(Linear\) prepared model\(s\), but the checkpoint 2 \(Linear, Linear\)",
        ),
        (lambda: [filled(0.0), filled(0.0, 2, 3)], r"weight is of shape \(2, 2\) there, and \(3, 2\) here"),
        (lambda: [filled(0.0), nn.Sequential(filled(0.0))], r"0\.weight was not saved.*weight was saved, but"),
        (lambda: [filled(0.0), nn.Linear(2, 2, bias=False)], "bias was saved, but the model has no such entry"),
    ],
    ids=["fewer models", "shape", "names", "entry"],
)
def test_models_that_do_not_fit_are_refused_before_anything_is_loaded(
    tmp_path: Path, make: Callable[[], list[nn.Module]], message: str
) -> None:
    accelerator = simple(filled(1.0), filled(2.0))
    accelerator.save_state(tmp_path / "c")
    models = make()
    for parameter in models[0].parameters():
        nn.init.zeros_(parameter)
    accelerator = simple(*models)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state(tmp_path / "c")
    assert value(models[0]) == 0.0
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    simple(filled(1.0), optimizer=torch.optim.Adam).save_state(tmp_path / "c")
    fresh = filled(0.0)
    with pytest.raises(CheckpointError, match=r"optimizer 0 \(SGD\) has 2 parameter group\(s\), but 1 were saved"):
        simple(
            fresh, optimizer=lambda ps: torch.optim.SGD([{"params": ps[:1]}, {"params": ps[1:]}], lr=1.0)
        ).load_state(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"does not fit.*does not hold 0\.bias, which was saved"):
        simple(fresh, optimizer=lambda ps: torch.optim.Adam(ps[:1])).load_state(tmp_path / "c")
    assert value(fresh) == 0.0


@pytest.mark.parametrize(
    ("saved", "other", "lacks"),
    [
        (torch.optim.SGD, torch.optim.Adam, "betas, eps"),
        (torch.optim.Adam, torch.optim.SGD, "dampening, momentum"),
        (torch.optim.AdamW, torch.optim.NAdam, "momentum_decay"),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused_before_anything_is_loaded(
    tmp_path: Path, saved: Any, other: Any, lacks: str
) -> None:
    simple(filled(1.0), optimizer=lambda ps: saved(ps, lr=0.1)).save_state(tmp_path / "c")
    fresh = filled(0.0)
    message = rf"optimizer 0 \({other.__name__}\) does not fit.*what was saved has no {lacks}, so it is the state of"
    with pytest.raises(CheckpointError, match=message):
        simple(fresh, optimizer=lambda ps: other(ps, lr=0.1)).load_state(tmp_path / "c")
    assert value(fresh) == 0.0


def test_an_optimizer_and_a_scheduler_of_another_class_take_over_what_was_saved_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(optimizer: Any, scheduler: Any) -> Accelerator:
        model = filled(1.0)
        accelerator = simple(model)
        made = optimizer(model.parameters(), lr=0.5)
        accelerator.prepare(made, scheduler(made))
        return accelerator

    from torch.optim.lr_scheduler import ConstantLR, LinearLR

    make(torch.optim.Adam, ConstantLR).save_state(tmp_path / "c")
    accelerator = make(torch.optim.AdamW, LinearLR)
    accelerator.load_state(tmp_path / "c")
    assert "optimizer 0 of this run (AdamW) took over what a Adam had saved" in caplog.text
    assert "scheduler 0 of this run (LinearLR) took over what a ConstantLR had saved" in caplog.text


def test_a_loader_of_other_data_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    accelerator = simple(filled(1.0))
    for loader in accelerator.prepare(numbers(22), numbers(22)):
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
    accelerator.save_state(tmp_path / "c")
    state.reset()
    accelerator = Accelerator(cpu=True)
    fresh = filled(0.0)
    loaders = accelerator.prepare(numbers(22), numbers(6), fresh)[:2]
    with pytest.raises(CheckpointError, match="loader 1: .*reads other data"):
        accelerator.load_state(tmp_path / "c")
    assert value(fresh) == 0.0
    assert [loader.state_dict()["position"] for loader in loaders] == [0, 0]
    assert [len(list(loader)) for loader in loaders] == [11, 3]
    accelerator.load_state(tmp_path / "c", strict=False)
    assert value(fresh) == 1.0
    assert [len(list(loader)) for loader in loaders] == [6, 3]


def numbers(count: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, Accelerator]:
    """A checkpoint of ones, and a run of zeros to load it into."""
    accelerator = simple(filled(1.0), optimizer=torch.optim.Adam)
    accelerator.register_for_checkpointing(Meter(5))
    accelerator.save_state(tmp_path / "c")
    fresh = filled(0.0)
    accelerator = simple(fresh, optimizer=torch.optim.Adam)
    accelerator.register_for_checkpointing(Meter())
    return tmp_path / "c", fresh, accelerator


def test_everything_in_a_checkpoint_is_json_or_safetensors_and_in_the_manifest(saved: Any) -> None:
    directory, _, _ = saved
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in there} == {".json", ".safetensors"}
    manifest = json.loads((directory / "manifest.json").read_text())
    assert there == {*manifest["files"], "manifest.json"}
    assert manifest["models"] == [{"kind": "Linear", "parameters": 6, "saved": True}]
    assert manifest["processes"] == 1


FILES = ["models/0/model.safetensors", "optimizers/0/state.json", "custom/0.json", "rng/rank_00000.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut off", "longer"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(saved: Any, name: str, damage: str) -> None:
    directory, fresh, accelerator = saved
    path = directory / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut off" else content + b" ")
    with pytest.raises(CheckpointError, match=name):
        accelerator.load_state(directory)
    assert value(fresh) == 0.0


def test_a_changed_letter_in_a_json_file_is_always_noticed(saved: Any) -> None:
    directory, fresh, accelerator = saved
    path = directory / "custom/0.json"
    path.write_text(path.read_text().replace("5", "6"))
    with pytest.raises(CheckpointError, match=r"custom/0\.json is damaged: its checksum"):
        accelerator.load_state(directory)
    assert value(fresh) == 0.0


@pytest.mark.parametrize("name", ["models/0/model", "rng/rank_00000"])
def test_a_changed_bit_in_a_tensor_is_noticed_unless_told_not_to_look(saved: Any, name: str) -> None:
    directory, fresh, accelerator = saved
    path = directory / f"{name}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}\.safetensors is damaged: its checksum"):
        accelerator.load_state(directory)
    assert value(fresh) == 0.0
    if not name.startswith("rng"):
        accelerator.load_state(directory, verify=False)
        assert value(fresh) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"version 2 of the format; this drivetrain reads version 1\. Upgrade"),
        ({"format": "zip"}, "no manifest of a checkpoint"),
        ({"files": {"../../secret": {"size": 1, "crc32": ""}}}, "outside the checkpoint"),
        ({"files": 3}, "manifest.json is damaged"),
        ({"models": None}, "manifest.json is damaged"),
    ],
    ids=["newer", "foreign", "outside", "type", "none"],
)
def test_a_manifest_that_makes_no_sense_is_refused(saved: Any, change: dict[str, Any], message: str) -> None:
    directory, fresh, accelerator = saved
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state(directory)
    assert value(fresh) == 0.0


def test_what_a_later_version_adds_to_the_manifest_does_no_harm(saved: Any) -> None:
    directory, fresh, accelerator = saved
    path = directory / "manifest.json"
    data = json.loads(path.read_text())
    data["models"][0]["more"] = data["more"] = 1
    path.write_text(json.dumps(data))
    accelerator.load_state(directory)
    assert value(fresh) == 1.0


def test_a_path_without_a_checkpoint_says_what_is_there(saved: Any, tmp_path: Path) -> None:
    _, _, accelerator = saved
    with pytest.raises(CheckpointError, match="d does not exist; checkpoints beside it: c"):
        accelerator.load_state(tmp_path / "d")
    (tmp_path / "d").mkdir()
    with pytest.raises(CheckpointError, match="is no complete checkpoint: it has no manifest.json"):
        accelerator.load_state(tmp_path / "d")


def test_options_nobody_knows_are_refused(saved: Any, tmp_path: Path) -> None:
    directory, _, accelerator = saved
    with pytest.raises(TypeError, match="save_state takes no option 'compress'"):
        accelerator.save_state(tmp_path / "e", compress=True)
    with pytest.raises(TypeError, match="load_state takes no option 'fast'"):
        accelerator.load_state(directory, load_kwargs={"fast": True})
    accelerator.load_state(directory, map_location="cpu")
