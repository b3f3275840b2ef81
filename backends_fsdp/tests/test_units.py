"""Which modules become units: by class, by size, by what they share, and by dtype. No processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain_fsdp.config import FsdpConfig
from drivetrain_fsdp.mesh import arrange
from drivetrain_fsdp.units import Plan, make_plan


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.mlp(self.attention(x, x, x)[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Any) -> Any:
        return self.head(self.tokens(x)) * self.temperature


class Hinting(Model):
    _no_split_modules = ["Layer", "NotHere"]


def plan(model: nn.Module, frozen_counts: bool = False, **section: Any) -> Plan:
    return make_plan("fsdp", model, FsdpConfig(**section), frozen_counts)


def names(model: nn.Module, modules: Any) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in modules]


@pytest.mark.parametrize(
    ("model", "section", "expected"),
    [
        (Model(), {}, []),
        (Hinting(), {}, ["layers.1", "layers.0"]),
        (nn.Sequential(Hinting(), nn.Linear(2, 2)), {}, ["0.layers.1", "0.layers.0"]),
        (Hinting(), {"wrap_policy": "none"}, []),
        (Hinting(), {"wrap_policy": "transformer"}, ["layers.1", "layers.0"]),
        (Model(), {"transformer_classes": "Layer"}, ["layers.1", "layers.0"]),
        (Model(), {"transformer_classes": ["Embedding", "Layer"]}, ["layers.1", "layers.0", "tokens"]),
        # An attention is used without calling what is in it, so it is one piece of 80.
        (Model(), {"min_num_params": 70}, ["layers.1.attention", "layers.0.attention"]),
        (Model(), {"min_num_params": 90}, ["layers.1", "layers.0"]),
        (Model(), {"min_num_params": 40}, ["head", "layers.1.attention", "layers.0.attention", "tokens"]),
    ],
)
def test_units_follow_the_policy_inner_ones_first(
    model: nn.Module, section: dict[str, Any], expected: list[str]
) -> None:
    assert names(model, plan(model, **section).units) == expected


@pytest.mark.parametrize(
    ("model", "section", "message"),
    [
        (Model(), {"transformer_classes": "Foo,Layer"}, "no module of class Foo. It has: Embedding, Layer, Linear"),
        (Model(), {"wrap_policy": "transformer"}, "does not name its own.*Embedding, Layer, Linear"),
        (Model(), {"min_num_params": 10_000}, "no module of at least 10000 parameters in Model, which has 281"),
        (Model(), {"ignored_modules": "layer"}, "'layer' matches no module.*layers.0.attention"),
        (Model(), {"ignored_modules": ["tail"]}, "'tail' is no module of Model. Its modules: tokens, layers"),
        (Model(), {"ignored_modules": [nn.Linear(2, 2)]}, "a Linear is no module of Model"),
        (Model(), {"ignored_modules": ".*"}, "names the whole Model"),
        (Model(), {"activation_checkpointing": True}, "it chose none in Model"),
    ],
)
def test_settings_that_match_nothing_say_what_there_is(model: nn.Module, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(model, **section)


def test_ignored_modules_and_scalars_stay_whole() -> None:
    model = Model()
    made = plan(model, transformer_classes="Layer,Linear", ignored_modules=r"layers\.1|head")
    assert names(model, made.units) == ["layers.0.mlp", "layers.0"]
    assert made.whole == {
        "head.weight",
        "temperature",
        *(f"layers.1.{n}" for n, _ in model.layers[1].named_parameters()),
    }
    assert {id(p) for p in made.whole_parameters()} == {id(p) for n, p in model.named_parameters() if n in made.whole}
    by_object = plan(model, ignored_modules=[model.head, "layers.1"])
    assert by_object.whole == made.whole


def test_modules_that_share_a_parameter_with_the_rest_are_left_to_the_unit_around_both() -> None:
    model = Model()
    model.head.weight = model.tokens.weight
    model.layers[1].mlp.weight = model.layers[0].mlp.weight
    assert names(model, plan(model, transformer_classes="Layer,Embedding,Linear").units) == []
    inside = nn.Sequential(model, nn.Linear(4, 4))
    assert names(inside, plan(inside, transformer_classes="Model,Embedding").units) == ["0"]


def test_recomputed_are_the_outermost_units_that_were_chosen() -> None:
    model = Model()
    made = plan(model, transformer_classes="Layer,Linear", activation_checkpointing=True)
    assert set(names(model, made.recomputed)) == {"layers.0", "layers.1", "head"}
    model.layers[0].mlp.weight = model.layers[1].mlp.weight
    assert set(names(model, plan(model, transformer_classes="Layer", activation_checkpointing=True).recomputed)) == {
        "layers.0",
        "layers.1",
    }


def test_every_module_belongs_to_exactly_one_unit() -> None:
    model = Model()
    made = plan(model, transformer_classes="Layer,Linear", ignored_modules=["tokens"])
    members = [names(model, made.members(unit)) for unit in (*made.units, model)]
    flat = [name for group in members for name in group]
    assert len(flat) == len(set(flat))
    assert set(flat) == {name for name, _ in model.named_modules()} - {"tokens"}


def test_parts_of_another_dtype_become_units() -> None:
    model = Model()
    model.layers[0].attention.bfloat16()
    model.head = nn.Linear(4, 9, bias=False).bfloat16()  # smaller than what is float32 around it
    assert names(model, plan(model, transformer_classes="Layer").units) == [
        "head",
        "layers.1",
        "layers.0.mlp",  # what there is more of stays in the unit around
        "layers.0",
    ]
    model.head.requires_grad_(False)
    assert "head" not in names(model, plan(model).units)
    assert "head" in names(model, plan(model, frozen_counts=True).units)


def test_a_module_of_two_dtypes_is_refused() -> None:
    model = Model()
    model.head = nn.Linear(4, 10)
    model.head.bias.data = model.head.bias.data.double()
    with pytest.raises(DrivetrainError, match=r"a Linear holds parameters of several dtypes.*bias \(torch.float64\)"):
        plan(model)


# ------------------------------------------------------------------------------------------------------------ the mesh


@settings(deadline=None)
@given(st.integers(1, 64), st.none() | st.integers(1, 64), st.none() | st.integers(1, 64))
def test_sizes_multiply_to_the_number_of_ranks_or_are_refused(
    size: int, replicate: int | None, shard: int | None
) -> None:
    possible = [(r, size // r) for r in range(1, size + 1) if size % r == 0]
    fitting = [(r, s) for r, s in possible if replicate in (None, r) and shard in (None, s)]
    if not fitting:
        with pytest.raises(ConfigError, match=f"can't be had with {size} processes"):
            arrange("fsdp", replicate, shard, size)
    elif replicate is None and shard is None:
        assert arrange("fsdp", None, None, size) == (1, size)
    else:
        assert [arrange("fsdp", replicate, shard, size)] == fitting
