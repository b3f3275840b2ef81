"""Recipes by name and option, made of Transformer Engine's own classes. They need no GPU, its kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from backends_fp8.tests import te_stand_in
from drivetrain.errors import ConfigError
from drivetrain_fp8 import TeConfig
from drivetrain_fp8.config import TeRecipe

engine = te_stand_in.engine_recipes()
pytestmark = pytest.mark.skipif(
    engine is None, reason="Transformer Engine's recipe classes are not installed: pip install transformer-engine"
)


@pytest.fixture(autouse=True)
def with_engine() -> Iterator[None]:
    with te_stand_in.installed():  # the classes themselves are the engine's
        yield


def make(name: str, **options: Any) -> Any:
    from drivetrain_fp8 import te_recipes

    return te_recipes.make(name, options)


@pytest.mark.parametrize("name", get_args(TeRecipe))
def test_every_recipe_is_the_engines_own(name: str) -> None:
    assert type(make(name)) is getattr(engine, name)


def test_options_are_those_of_the_engine() -> None:
    delayed = make("DelayedScaling", margin=1, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False)
    assert (delayed.margin, delayed.amax_history_len) == (1, 16)
    assert (delayed.amax_compute_algo, delayed.reduce_amax) == ("most_recent", False)
    assert make("NVFP4BlockScaling", disable_rht=True).disable_rht
    assert make("Float8BlockScaling", x_block_scaling_dim=1).x_block_scaling_dim == 1


def test_number_formats_are_given_by_name() -> None:
    assert make("DelayedScaling", fp8_format="E4M3").fp8_format is engine.Format.E4M3
    assert make("MXFP8BlockScaling", fp8_format="hybrid").fp8_format is engine.Format.HYBRID
    with pytest.raises(ConfigError, match=r"DelayedScaling.fp8_format: 'E3M4' is none of .*HYBRID"):
        make("DelayedScaling", fp8_format="E3M4")


def test_groups_of_settings_are_given_as_mappings() -> None:
    recipe = make("Float8CurrentScaling", fp8_gemm_fprop={"use_split_accumulator": True})
    assert recipe.fp8_gemm_fprop.use_split_accumulator
    with pytest.raises(ConfigError, match="Float8CurrentScaling.fp8_gemm_fprop has no option 'split'"):
        make("Float8CurrentScaling", fp8_gemm_fprop={"split": True})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DelayedScaling", {"amax_histroy_len": 16}, "no option 'amax_histroy_len'; did you mean 'amax_history_len'"),
        ("MXFP8BlockScaling", {"qqq": 1}, "MXFP8BlockScaling has no option 'qqq'. It has: margin, fp8_format"),
        ("DelayedScaling", {"fp8_format": "E5M2"}, "DelayedScaling refuses .*Pure E5M2 training is not supported"),
        ("DelayedScaling", {"amax_history_len": "long"}, "DelayedScaling refuses"),
    ],
)
def test_what_the_engine_does_not_take_is_a_config_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


def test_a_recipe_that_this_engine_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(engine, "NVFP4BlockScaling")
    with pytest.raises(ConfigError, match="the installed Transformer Engine has no NVFP4BlockScaling; upgrade it"):
        make("NVFP4BlockScaling")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("DelayedScaling", 16), ("Float8CurrentScaling", 16), ("MXFP8BlockScaling", 32), ("Float8BlockScaling", 128)],
)
def test_shapes_must_fill_the_blocks_that_share_a_scale(name: str, expected: int) -> None:
    from drivetrain_fp8 import te_recipes

    assert te_recipes.multiple(make(name)) == expected


def test_options_without_a_recipe_are_refused() -> None:
    with pytest.raises(ValueError, match=r"options \(margin\) are those of a recipe, and none is named"):
        TeConfig(options={"margin": 1})
