"""The weights of one model as files, read back by the safetensors library and by torch."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.checkpoint.model_files import open_weights, parse_size, untie, write_model_files
from drivetrain.checkpoint.objects import load, save
from drivetrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_run")


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def stack(layers: int = 3) -> nn.Sequential:
    """Each layer has 400 bytes."""
    return nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(layers)))


def read_by_index(directory: Path, ending: str = "safetensors") -> dict[str, Tensor]:
    """As other tools read: what the index says, from the files it names."""
    prefix = "model" if ending == "safetensors" else "pytorch_model"
    index = json.loads((directory / f"{prefix}.{ending}.index.json").read_text())
    found: dict[str, Tensor] = {}
    for name, file in index["weight_map"].items():
        path = directory / file
        loaded = safetensors.torch.load_file(path) if ending == "safetensors" else torch.load(path, weights_only=True)
        found[name] = loaded[name]
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(("safe", "ending"), [(True, "safetensors"), (False, "bin")])
def test_shards_have_a_valid_index_and_a_smaller_save_leaves_none(
    accelerator: Accelerator, tmp_path: Path, safe: bool, ending: str
) -> None:
    stem = "model" if safe else "pytorch_model"
    model = stack()
    accelerator.save_model(model, tmp_path, max_shard_size=500, safe_serialization=safe)
    shards = [f"{stem}-0000{k}-of-00003.{ending}" for k in (1, 2, 3)]
    assert names(tmp_path) == [*shards, f"{stem}.{ending}.index.json"]
    index = json.loads((tmp_path / f"{stem}.{ending}.index.json").read_text())
    assert index["metadata"]["total_size"] == 1200
    assert index["weight_map"] == {f"{k}.weight": shards[k] for k in range(3)}
    assert equal(read_by_index(tmp_path, ending), model.state_dict())

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-best.safetensors").write_text("of the user")
    accelerator.save_model(stack(2), tmp_path, max_shard_size=500, safe_serialization=safe)
    assert len([name for name in names(tmp_path) if "-of-" in name]) == 2
    small = stack(1)
    accelerator.save_model(small, tmp_path, safe_serialization=safe)
    assert names(tmp_path) == ["config.json", "model-best.safetensors", f"{stem}.{ending}"]
    path = tmp_path / f"{stem}.{ending}"
    loaded = safetensors.torch.load_file(path) if safe else torch.load(path, weights_only=True)
    assert equal(loaded, small.state_dict())


def test_shards_are_read_back_with_tied_names(tmp_path: Path) -> None:
    tensors = {f"layer.{k}": torch.full((10,), float(k)) for k in range(6)}
    tensors["tied"] = tensors["layer.4"]
    write_model_files(tmp_path, tensors, max_shard_size=100)
    with open_weights(tmp_path) as weights:
        assert equal(dict(weights), tensors)
        assert weights.shape("tied") == (10,)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 40))
def test_shards_are_filled_in_order_and_never_above_the_limit(sizes: list[int], limit: int) -> None:
    from drivetrain.checkpoint.model_files import _cut

    tensors = {str(k): torch.zeros(size, dtype=torch.uint8) for k, size in enumerate(sizes)}
    shards = _cut(tensors, limit)
    assert [name for shard in shards for name in shard] == list(tensors)
    for shard in shards:
        assert shard
        assert sum(len(tensor) for tensor in shard.values()) <= limit or len(shard) == 1
    for one, following in itertools.pairwise(shards):
        first = next(iter(following.values()))
        assert sum(map(len, one.values())) + len(first) > limit, "no shard is closed before it is full"


@pytest.mark.parametrize(
    ("text", "size"),
    [(500, 500), ("500", 500), ("10GB", 10**10), ("1.5 kb", 1500), ("2MiB", 2**21), ("5G", 5 * 10**9), ("3B", 3)],
)
def test_sizes_are_decimal_unless_they_say_otherwise(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", 0, "1 XB", "ten", "1I", "9" * 400])
def test_a_size_that_is_none_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_tied_weights_are_in_the_file_once_and_the_metadata_says_so(accelerator: Accelerator, tmp_path: Path) -> None:
    model = stack(2)
    model[1].weight = model[0].weight
    accelerator.save_model(model, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["0.weight"]
        assert file.metadata() == {"format": "pt", "1.weight": "0.weight"}
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


def test_ties_are_seen_in_the_model_when_tensors_were_gathered_apart() -> None:
    model = stack(2)
    model[1].weight = model[0].weight
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept, aliases = untie(gathered, model)
    assert list(kept) == ["0.weight"]
    assert aliases == {"1.weight": "0.weight"}


def test_views_of_one_memory_that_differ_are_kept_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {"all": base, "head": base[:2], "reversed": base.view(2, 3).t(), "same": base.view(6)}
    write_model_files(tmp_path, tensors)
    with open_weights(tmp_path) as weights:
        assert equal(dict(weights), tensors)
    write_model_files(tmp_path, {"head": base[:2]}, safe=False)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 2500


def test_the_unwrapped_model_gives_the_same_bytes(accelerator: Accelerator, tmp_path: Path) -> None:
    model = accelerator.prepare(stack(2))
    accelerator.save_model(model, tmp_path / "wrapped", max_shard_size=400)
    accelerator.save_model(accelerator.unwrap_model(model), tmp_path / "unwrapped", max_shard_size=400)
    assert names(tmp_path / "wrapped") == names(tmp_path / "unwrapped")
    for name in names(tmp_path / "wrapped"):
        assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "unwrapped" / name).read_bytes()


@pytest.mark.parametrize("size", ["10GB", 400])
def test_a_save_that_fails_leaves_the_files_that_were_there(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: Any
) -> None:
    model = stack(2)
    accelerator.save_model(model, tmp_path, max_shard_size=size)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left on device"):
        accelerator.save_model(stack(3), tmp_path, max_shard_size=400)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_what_is_no_weight_is_named(accelerator: Accelerator, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(CheckpointError, match="'_extra_state' can't be saved as a weight: it is a dict"):
        accelerator.save_model(Odd(), tmp_path)
    with pytest.raises(CheckpointError, match="weight 'weight' can't be saved: it is on the meta device"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file; give a directory"):
        accelerator.save_model(stack(), tmp_path / "file")
    assert names(tmp_path) == ["file"]


def test_what_can_not_be_deleted_of_an_earlier_save_is_named(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").mkdir()
    with pytest.raises(
        CheckpointError, match=r"the model is saved, but .*index\.json of an earlier save can't be deleted"
    ):
        accelerator.save_model(stack(), tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_get_state_dict_has_the_names_of_the_users_module(accelerator: Accelerator) -> None:
    model = stack(2)
    assert equal(accelerator.get_state_dict(accelerator.prepare(model)), model.state_dict())
    other = stack(1)
    assert equal(accelerator.get_state_dict(other), other.state_dict())
    assert equal(accelerator.get_state_dict(model, unwrap=False), model.state_dict())


# ---------------------------------------------------------------------------------------------------------------- save


def test_save_writes_what_torch_and_safetensors_read(accelerator: Accelerator, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    accelerator.save({"model": tensors, "epoch": 3}, tmp_path / "sub" / "state.pt")
    loaded = torch.load(tmp_path / "sub" / "state.pt", weights_only=True)
    assert loaded["epoch"] == 3
    assert equal(loaded["model"], tensors)
    accelerator.save(tensors, tmp_path / "weights.safetensors")
    accelerator.save(tensors, str(tmp_path / "weights"), safe_serialization=True)
    assert equal(safetensors.torch.load_file(tmp_path / "weights.safetensors"), tensors)
    assert equal(safetensors.torch.load_file(tmp_path / "weights"), tensors)
    buffer = io.BytesIO()
    accelerator.save(tensors, buffer)
    buffer.seek(0)
    assert equal(torch.load(buffer, weights_only=True), tensors)


def test_a_save_that_fails_leaves_the_old_file(accelerator: Accelerator, tmp_path: Path) -> None:
    accelerator.save({"a": 1}, tmp_path / "state.pt")
    with pytest.raises(AttributeError, match="local"):
        accelerator.save({"a": lambda: 1}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="only a dict of tensors"):
        accelerator.save({"a": 1}, tmp_path / "state.safetensors")
    assert names(tmp_path) == ["state.pt"]
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"a": 1}


# ------------------------------------------------------------------------------------------- without an Accelerator


@pytest.mark.parametrize("name", ["o.pt", "o.safetensors"])
def test_objects_are_saved_and_loaded_without_an_accelerator(tmp_path: Path, name: str) -> None:
    data = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save(data, tmp_path / name)
    assert equal(load(tmp_path / name), data)
    assert names(tmp_path) == [name]


def test_safetensors_may_be_asked_for_by_argument(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "odd.ending", safe_serialization=True)
    assert equal(safetensors.torch.load_file(tmp_path / "odd.ending"), {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="only a dict of tensors"):
        save([torch.ones(1)], tmp_path / "list.safetensors")


def test_what_tensors_share_and_their_dtypes_come_back_from_safetensors(tmp_path: Path) -> None:
    one = torch.arange(3.0)
    data = {"one": one, "same": one, "format": one, "complex": torch.tensor([1 + 2j]), "pt": torch.ones(1)}
    save(data, tmp_path / "o.safetensors")
    loaded = load(tmp_path / "o.safetensors", map_location="cpu")
    assert equal(loaded, data)
    assert loaded["complex"].dtype == torch.complex64
    assert loaded["one"] is loaded["same"]


def test_a_file_is_read_by_what_is_in_it_and_a_tilde_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save({"a": torch.ones(1)}, "~/odd.ending", safe_serialization=True)
    assert equal(load("~/odd.ending"), {"a": torch.ones(1)})
    save({"a": 1}, "~/o.pt")
    assert load("~/o.pt") == {"a": 1}


def test_errors_of_loading_an_object_name_the_file(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "o.safetensors")
    with pytest.raises(TypeError, match="map_location must be a device for .*safetensors.*got dict"):
        load(tmp_path / "o.safetensors", map_location={"cuda:0": "cpu"})
    for name in ("o.safetensors", "o.pt"):
        save({"a": torch.ones(9)}, tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name)
        with pytest.raises(FileNotFoundError, match=f"no_{name}"):
            load(tmp_path / f"no_{name}")
    (tmp_path / "o.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"o\.pt is damaged: it ends too early"):
        load(tmp_path / "o.pt")


def test_safetensors_do_not_go_to_an_open_file_as_a_pickle() -> None:
    with pytest.raises(CheckpointError, match="safe_serialization=True needs a path"):
        save({"a": torch.ones(1)}, io.BytesIO(), safe_serialization=True)


def test_a_weight_may_be_called_what_the_metadata_of_files_say(tmp_path: Path) -> None:
    tensors = {"pt": torch.ones(1), "own": torch.zeros(1)}
    write_model_files(tmp_path, tensors)
    with open_weights(tmp_path) as weights:
        assert equal(dict(weights), tensors)
    tensors.update(dict.fromkeys(("format", "stored_as_bytes", "tied"), tensors["own"]))
    write_model_files(tmp_path, tensors)
    with open_weights(tmp_path) as weights:
        assert equal(dict(weights), tensors)
    assert safetensors.safe_open(tmp_path / "model.safetensors", "pt").metadata()["format"] == "pt"


def test_loading_an_object_runs_no_code(tmp_path: Path) -> None:
    torch.save(os.getpid, tmp_path / "code.pt")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "code.pt")
