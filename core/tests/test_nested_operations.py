"""What scripts do with nested batches: moving, joining, slicing, measuring."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from drivetrain.nested import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    honor_type,
    leaves,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

Pair = namedtuple("Pair", ["a", "b"])


def test_moving_keeps_structure_and_leaves_named_keys_where_they_are():
    batch = {"x": torch.ones(2), "keep": torch.ones(2), "deep": [{"keep": torch.ones(1), "y": torch.ones(1)}], "s": "t"}
    moved = send_to_device(batch, "meta", skip_keys="keep")
    assert moved["x"].device.type == "meta"
    assert moved["keep"] is batch["keep"]
    assert moved["deep"][0]["keep"] is batch["deep"][0]["keep"]
    assert moved["deep"][0]["y"].device.type == "meta"
    assert moved["s"] == "t"
    assert batch["x"].device.type == "cpu"


def test_moving_keeps_the_types_of_mappings_and_tuples():
    batch = defaultdict(list, {"pair": Pair(torch.ones(1), 3)})
    for skip in (None, ["other"]):
        moved = send_to_device(batch, "meta", skip_keys=skip)
        assert type(moved) is defaultdict
        assert moved.default_factory is list
        assert type(moved["pair"]) is Pair
        assert moved["pair"].a.device.type == "meta"


def test_objects_that_move_themselves_do():
    class Batch:
        device = "cpu"

        def to(self, device: str) -> Batch:
            moved = Batch()
            moved.device = device
            return moved

    assert send_to_device([Batch()], "meta")[0].device == "meta"


def test_a_packed_sequence_keeps_what_must_stay_where_it_is():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    for batch in ({"x": packed}, [packed], Pair(packed, 1)):
        moved = next(item for item in leaves(send_to_device(batch, "meta"), is_packed) if is_packed(item))
        assert moved.data.device.type == "meta"
        assert moved.batch_sizes.device.type == "cpu"


def is_packed(item: object) -> bool:
    return isinstance(item, torch.nn.utils.rnn.PackedSequence)


def test_a_field_that_is_called_to_does_not_move_its_tuple():
    Edge = namedtuple("Edge", ["to", "weight"])
    moved = send_to_device(Edge(torch.ones(1), 2), "meta")
    assert type(moved) is Edge
    assert moved.to.device.type == "meta"


def test_the_batch_size_is_that_of_the_first_tensor_with_rows():
    assert find_batch_size({"scale": torch.tensor(1.0), "x": [torch.ones(5, 2)], "y": torch.ones(3)}) == 5
    assert find_batch_size({"a": 1, "b": torch.tensor(2.0)}) is None
    assert find_device(["x", torch.ones(1, device="meta")]) == torch.device("meta")
    assert find_device("x") is None


def test_structures_are_joined_tensor_by_tensor():
    items = [{"x": torch.full((n, 2), float(n)), "more": Pair(torch.ones(n), torch.zeros(1, n))} for n in (1, 2)]
    joined = concatenate([{"x": item["x"], "a": item["more"].a} for item in items])
    assert joined["x"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert joined["a"].shape == (3,)
    assert concatenate([item["more"].b for item in items], dim=1).shape == (1, 3)
    assert type(concatenate([Pair(torch.ones(1), torch.ones(1))] * 2)) is Pair


@pytest.mark.parametrize("items", [[], [[torch.ones(1)], [torch.ones(1), torch.ones(1)]], [["a"], ["b"]]])
def test_what_can_not_be_joined_is_an_error(items):
    with pytest.raises((TypeError, ValueError)):
        concatenate(items)


def test_slicing_listing_and_casting_leave_other_values_alone():
    batch = {"x": torch.arange(4), "s": "text"}
    assert listify(slice_tensors(batch, slice(1, 3))) == {"x": [1, 2], "s": "text"}
    cast = convert_to_fp32([torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)])
    assert [tensor.dtype for tensor in cast] == [torch.float32, torch.int64]


def test_a_function_is_applied_to_the_leaves_that_pass_the_test():
    assert recursively_apply(lambda x, n: x * n, {"a": 1, "b": "t"}, 3, test_type=lambda x: isinstance(x, int)) == {
        "a": 3,
        "b": "t",
    }
    with pytest.raises(TypeError, match="neg can't be applied to a str"):
        recursively_apply(torch.neg, [torch.ones(1), "text"], error_on_other_type=True)


def test_sequences_keep_their_type():
    assert honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)
    assert honor_type([1], (x for x in (1, 2))) == [1, 2]
    assert type(honor_type(OrderedDict(a=1), {"b": 2}.items())) is OrderedDict
