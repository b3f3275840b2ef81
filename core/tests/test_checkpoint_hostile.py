"""Checkpoints and files from anyone: they run no code, and lead to no file outside of their directory."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from core.tests.checkpoints import filled, simple, value
from drivetrain.cli import main
from drivetrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")

SECRET = 7.0


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    """A checkpoint to be changed by :func:`forge`, in a directory with weights that are none of its business."""
    simple(filled(1.0), optimizer=torch.optim.Adam).save_state(tmp_path / "c")
    for name in ("secret", "rank_secret"):
        save_file(
            {"weight": torch.full((2, 2), SECRET), "bias": torch.full((2,), SECRET)}, tmp_path / f"{name}.safetensors"
        )
    return tmp_path / "c"


def forge(directory: Path) -> None:
    """List all files that are there in the manifest, with their checksums: those keep off accidents, not people."""
    manifest = json.loads((directory / "manifest.json").read_text())
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest["files"] = {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "crc32": f"{zlib.crc32(path.read_bytes()):08x}",
        }
        for path in files
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def refuse(directory: Path, message: str) -> None:
    """Neither loading nor merging gets past it."""
    forge(directory)
    fresh = filled(0.0)
    with pytest.raises(CheckpointError, match=message):
        simple(fresh, optimizer=torch.optim.Adam).load_state(directory)
    assert value(fresh) == 0.0
    if "models" in message:
        done = CliRunner().invoke(main, ["merge-weights", str(directory), str(directory.parent / "out")])
        assert done.exit_code == 1
        assert "is damaged" in done.stderr
        assert not (directory.parent / "out").exists()


@pytest.mark.parametrize("name", ["../../../secret.safetensors", "{parent}/secret.safetensors", "..", "", 5, ["x"]])
def test_an_index_of_shards_leads_to_no_other_directory(crafted: Path, name: Any) -> None:
    if isinstance(name, str):
        name = name.format(parent=crafted.parent)
    weights = crafted / "models/0/model.safetensors"
    weights.unlink()
    weights.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    refuse(crafted, r"models/0/model\.safetensors\.index\.json is damaged")


def in_pieces(directory: Path, **changes: Any) -> None:
    """Put weights in pieces in place of the whole ones."""
    (directory / "models/0/model.safetensors").unlink()
    save_file({"weight": torch.ones(4), "bias": torch.ones(2)}, directory / "models/0/rank_00000.safetensors")
    entry = {"shape": [4], "dtype": {"$dtype": "float32"}, "parts": [[0, 4, 0]], **changes}
    index = {
        "format": "drivetrain-sharded",
        "version": 1,
        "tensors": {"weight": entry},
        "others": {"aliases": {}, "extra": {}},
    }
    (directory / "models/0/sharded.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [[0, 4, "0/../../../../rank_secret"]]},
        {"parts": [[0, 4, -1]]},
        {"parts": [[0, 2, 0]]},
        {"parts": [[0, 2, 0], [3, 4, 0]]},
        {"parts": [[0, 4.0, 0]]},
        {"parts": [[0, 4]]},
        {"parts": 3},
        {"shape": [-4]},
        {"shape": ["4"]},
        {"dtype": "float32"},
    ],
    ids=["rank", "negative rank", "end", "gap", "fraction", "short", "type", "shape", "text", "dtype"],
)
def test_an_index_of_pieces_that_makes_no_sense_is_refused(crafted: Path, changes: dict[str, Any]) -> None:
    """Gaps would let through whatever was in memory, and a rank that is a text leads to any file."""
    in_pieces(crafted, **changes)
    refuse(crafted, r"models/0/sharded\.json is damaged")


def test_what_was_stored_as_bytes_must_fit_what_is_said_of_it(crafted: Path) -> None:
    metadata = {"stored_as_bytes": json.dumps({"weight": ["complex64", [5, 5]]})}
    weights = {"weight": torch.zeros(16, dtype=torch.uint8), "bias": torch.ones(2)}
    save_file(weights, crafted / "optimizers/0/state.safetensors", metadata=metadata)
    refuse(crafted, r"optimizers/0/state\.safetensors is damaged: tensor 'weight' does not fit")


class Executes:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "name", ["models/0/model.safetensors", "optimizers/0/state.json", "optimizers/0/state.safetensors"]
)
def test_a_pickle_in_place_of_any_file_is_never_run(
    crafted: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (crafted / name).write_bytes(pickle.dumps(Executes()))
    refuse(crafted, rf"{name} is damaged")
    assert not any((tmp_path / "work").iterdir())
    pickle.loads(pickle.dumps(Executes()))
    assert any((tmp_path / "work").iterdir())


def test_a_link_in_a_replaced_checkpoint_does_not_take_files_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("")
    simple(filled(1.0)).save_state(tmp_path / "c")
    (tmp_path / "c" / "models" / "1").symlink_to(tmp_path / "home")
    simple(filled(1.0), filled(2.0)).save_state(tmp_path / "c")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["precious"]
    assert not (tmp_path / "c" / "models" / "1").is_symlink()


WRONG: dict[str, Any] = {
    "drivetrain": 1,
    "created": None,
    "processes": "2",
    "data_size": 0,
    "backend": ["ddp"],
    "precision": None,
    "step": -1,
    "iteration": "7",
    "models": [{"kind": 1}],
    "optimizers": {"0": {}},
    "scaler": "none",
    "files": {"rng/rank_00000.json": {"size": "1", "crc32": ""}},
}


@pytest.mark.parametrize("key", WRONG)
def test_a_manifest_with_a_value_of_another_type_is_refused_by_its_name(crafted: Path, key: str) -> None:
    path = crafted / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: WRONG[key]}))
    fresh = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged \(\w+: "):
        simple(fresh, optimizer=torch.optim.Adam).load_state(crafted)
