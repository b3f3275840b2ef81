"""Nested data to JSON and tensors and back: exactly, or refused with its place in the data."""

from __future__ import annotations

import datetime
import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drivetrain.checkpoint.tensors import TensorFile, read_tensors, write_tensors
from drivetrain.checkpoint.tree import decode, encode, read_tree, write_tree
from drivetrain.errors import CheckpointError

DTYPES = [
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and name == str(value).removeprefix("torch.") and name[0] != "q"
]
"""All but those of quantized tensors, and without second names."""


def through_json(data: Any) -> Any:
    tree, tensors = encode(data)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def same(one: Any, other: Any) -> bool:
    """Equal in type, structure, order and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return factories and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, deque)):
        lengths = len(one) == len(other) and getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return lengths and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))  # a NaN is not even equal to itself
    return bool(one == other)


keys = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.floats(), st.binary(), st.tuples(st.text(), st.integers())
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**20),
    st.floats(),
    st.text(st.characters(codec=None, exclude_categories=())),  # halves of surrogate pairs too
    st.binary(),
    st.complex_numbers(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0])]),
    st.sampled_from([np.float64(1.5), np.int8(-3), np.bool_(True), np.float32("nan"), np.datetime64("2020-01-02")]),
    st.sampled_from([np.str_("é"), np.str_(""), np.bytes_(b"")]),
)
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.lists(inner).map(lambda items: deque(items, len(items) + 1)),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(OrderedDict),
        st.sets(keys),
        st.frozensets(keys),
    ),
    max_leaves=20,
)


@given(nested)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_nested_data_comes_back_as_it_was(data: Any) -> None:
    assert same(through_json(data), data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        tensors = [(torch.arange(48, dtype=torch.uint8) % 2).view(dtype).reshape(-1, 1), torch.empty(0, 3, dtype=dtype)]
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"torch itself makes no plain tensors of it: {error}")
    if dtype.is_floating_point and dtype.itemsize > 1:
        tensors.append(torch.tensor(math.nan).to(dtype))
    write_tree(tmp_path / "state", tensors, "the data")
    assert same(read_tree(tmp_path / "state"), tensors)


@pytest.mark.parametrize("dtype", ["<f8", ">i4", "?", "<c16", "<M8[ms]", "<m8[s]", "S3", "<U4", "<u2", "<f2"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_arrays_come_back_in_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    assert same(through_json({"a": array}), {"a": array})


def test_strided_conjugate_and_parameter_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    data = {
        "transposed": base.t(),
        "every second": base[:, ::2],
        "one of every second": base[1, ::2][:1],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    write_tree(tmp_path / "data", data, "data")
    back = read_tree(tmp_path / "data")
    assert all(torch.equal(back[name], value) for name, value in data.items())


def test_one_tensor_in_two_places_is_written_once_and_is_one_again() -> None:
    shared = torch.ones(3)
    tree, tensors = encode({"a": shared, "b": [shared.view(3)], "c": shared.clone()})
    assert len(tensors) == 2
    back = decode(tree, tensors)
    assert back["a"] is back["b"][0]
    assert back["a"] is not back["c"]


def test_a_conjugate_view_is_not_taken_for_the_tensor_it_shares_memory_with() -> None:
    plain = torch.tensor([1 + 2j])
    back = through_json([plain, plain.conj()])
    assert torch.equal(back[1], torch.tensor([1 - 2j]))


def test_paths_that_look_the_same_get_tensors_of_their_own() -> None:
    data = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)}
    assert same(through_json(data), data)


def test_containers_with_a_rule_of_their_own_keep_it() -> None:
    data = {"counter": Counter("abca"), "lists": defaultdict(list, {1: [2]}), "none": defaultdict(None, {})}
    assert same(through_json(data), data)


def test_without_tensors_there_is_no_tensor_file(tmp_path: Path) -> None:
    write_tree(tmp_path / "state", {"a": 1}, "the data")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_nothing_tensors_read_depends_on_their_file(tmp_path: Path) -> None:
    write_tree(tmp_path / "state", torch.ones(4), "the data")
    back = read_tree(tmp_path / "state")
    with (tmp_path / "state.safetensors").open("r+b") as file:
        file.truncate(0)
    back += 1
    assert back.tolist() == [2.0] * 4


# ---------------------------------------------------------------------------------------------------- what is refused


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


def cycle() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(10_000):
        nest = [nest]
    return nest


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "type builtins.object"),
        (Color.RED, "Color"),
        (Point(1, 2), "_asdict"),
        (datetime.timedelta(1), "datetime.timedelta"),
        (len, "builtin_function_or_method"),
        (int, "the class builtins.int"),
        (nn.Linear(1, 1), "state_dict"),
        (torch.Generator(), "get_state"),
        (np.array([object()]), "array of object"),
        (np.zeros(1, dtype=[("a", "f4")]), "array of"),
        (np.ma.masked_array([1], mask=[True]), "MaskedArray"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantized"),
        (defaultdict(lambda: 1), "defaultdict"),
        (cycle(), "contains itself"),
        (deep(), "nested too deeply"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_not_be_kept_is_refused_with_its_place(value: Any, reason: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [{"b c": value}]}, "state of optimizer 0 (Adam)")
    assert "state of optimizer 0 (Adam)" in str(caught.value)
    assert reason in str(caught.value)
    if reason != "nested too deeply":
        assert "['a'][0]['b c']" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": {"$pickle": "gASVAAAAAAAAAAAu"}}',
        '{"$tensor": "absent"}',
        '{"$array": ["absent", "O", [1]]}',
        '{"$numpy": ["|O", "00"]}',
        '{"$dtype": "load"}',
        '{"$defaultdict": ["eval", []]}',
        '{"$tuple": 3}',
        '{"$int": "x"}',
        '{"$tuple": [1], "more": 2}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_or_hostile_file_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="state.json"):
        read_tree(tmp_path / "state")


# ---------------------------------------------------------------------------------------- safetensors, by their library


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]
    tensors = {f"{dtype} tensor": torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 2), "ünïcode": torch.ones(1)}
    write_tensors(tmp_path / "x.safetensors", tensors, {"key": "value"})
    back = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "key": "value"}


@given(st.permutations(["a", "b", "c", "d"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=10)
def test_the_order_of_tensors_does_not_change_the_file(tmp_path: Path, order: list[str]) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(5, dtype=torch.int8)}
    tensors["d"] = torch.zeros(())
    write_tensors(tmp_path / "reference", tensors)
    write_tensors(tmp_path / "other", {name: tensors[name] for name in order})
    assert (tmp_path / "reference").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("length", [0, 4, 20, 100])
def test_a_cut_off_tensor_file_is_an_error_that_names_it(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.ones(20)})
    with path.open("r+b") as file:
        file.truncate(length)
    with pytest.raises(CheckpointError, match="x.safetensors is damaged"):
        read_tensors(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="x.safetensors is missing"):
        read_tensors(path)


def test_an_error_of_the_reader_is_not_taken_for_a_damaged_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="mine"), TensorFile.open(tmp_path / "x.safetensors"):
        raise ValueError("mine")
