"""Walking nested data keeps every container what it was."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import pytest
import torch

from drivetrain.nested import cast_floats, leaves, map_tensors


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    loss: Any
    ids: Any
    note: str = "n"


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A mapping that is a dataclass too, as model outputs often are."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


@attrs.frozen
class Frozen:
    x: Any


class MyList(list):
    pass


HALF = torch.ones(2, dtype=torch.bfloat16)
IDS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    "data",
    [
        (HALF, IDS),
        [HALF, [IDS, "s"]],
        {"a": HALF, "b": (IDS, None)},
        Pair(HALF, 3),
        Record(HALF, IDS),
        Frozen(HALF),
        MyList([HALF]),
        collections.OrderedDict(a=HALF),
        collections.defaultdict(list, a=HALF),
        collections.UserDict(a=HALF),
        MappingProxyType({"a": HALF}),
    ],
    ids=lambda data: type(data).__name__,
)
def test_types_are_kept_and_only_floats_are_cast(data: Any) -> None:
    cast = cast_floats(data, torch.float32)
    assert type(cast) is type(data)
    before, after = leaves(data), leaves(cast)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor) and old.is_floating_point():
            assert new.dtype == torch.float32
            assert old.dtype == torch.bfloat16, "the input was changed"
        else:
            assert new is old


def test_a_defaultdict_keeps_its_factory() -> None:
    mapped = map_tensors(lambda t: t + 1, collections.defaultdict(list, x=torch.zeros(1)))
    assert mapped.default_factory is list
    assert mapped["x"].item() == 1


def test_an_output_that_is_mapping_and_dataclass_agrees_with_itself() -> None:
    output = cast_floats(Output(loss=HALF, logits=HALF), torch.float32)
    assert type(output) is Output
    assert output["loss"].dtype == output.loss.dtype == torch.float32


def test_double_precision_is_never_cast_down() -> None:
    assert cast_floats(torch.ones(1, dtype=torch.float64), torch.float32).dtype == torch.float64
