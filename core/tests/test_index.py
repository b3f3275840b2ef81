"""Where public names are found: ``drivetrain``, and ``drivetrain.utils`` as an index under the names scripts know."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from importlib import import_module

import pytest

import drivetrain
from drivetrain import utils
from drivetrain.distributed_type import DistributedType


@pytest.mark.parametrize("index", [drivetrain, utils], ids=["drivetrain", "drivetrain.utils"])
def test_every_name_is_defined_where_the_index_says(index):
    for name, module in index._PUBLIC.items():
        assert getattr(index, name) is getattr(import_module(module), name)
        assert name in import_module(module).__all__, f"{module} does not offer {name}"
        assert name in dir(index)


def test_both_places_mean_the_same():
    for name in set(drivetrain._PUBLIC) & set(utils._PUBLIC):
        assert drivetrain._PUBLIC[name] == utils._PUBLIC[name]


def test_the_index_defines_nothing_and_costs_nothing():
    code = "import sys, drivetrain.utils; dir(drivetrain.utils); print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert [name for name in vars(utils) if callable(vars(utils)[name]) and name.startswith("_")] == [
        "__getattr__",
        "__dir__",
    ]


def test_names_of_plugins_are_found_in_both_places():
    pytest.importorskip("drivetrain_backends")
    from drivetrain.utils import InitProcessGroupKwargs

    assert InitProcessGroupKwargs is drivetrain.InitProcessGroupKwargs


def test_an_unknown_name_is_an_import_error_that_names_the_place():
    with pytest.raises(AttributeError, match=r"module 'drivetrain\.utils' has no attribute 'InitProcesGroupKwargs'"):
        utils.InitProcesGroupKwargs  # a letter is missing
    with pytest.raises(ImportError):
        from drivetrain.utils import no_such_name  # noqa: F401


def test_distributed_types_are_texts_and_open():
    assert DistributedType.NO == "NO"
    assert DistributedType("SOME_VENDOR") == DistributedType.SOME_VENDOR
    assert DistributedType.NO != DistributedType.MULTI_CPU
    assert DistributedType.NO.value == "NO"
    assert type(DistributedType.NO.value) is str
    assert f"{DistributedType.MULTI_CPU}" == "MULTI_CPU"
    assert repr(DistributedType.NO) == "DistributedType.NO"
    assert pickle.loads(pickle.dumps(DistributedType.NO)) == copy.deepcopy(DistributedType.NO) == "NO"
    assert {DistributedType.NO: 1}["NO"] == 1


def test_a_name_that_is_not_in_capitals_is_no_distributed_type():
    with pytest.raises(AttributeError, match="'multi_cpu' is no distributed type"):
        DistributedType.multi_cpu
