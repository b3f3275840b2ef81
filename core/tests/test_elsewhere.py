"""Names that scripts know from elsewhere: what is here under them, and what is said of those that are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import registry, utils
from drivetrain.availability import is_available
from drivetrain.elsewhere import INSTEAD
from drivetrain.nested import is_namedtuple, merge_dicts
from drivetrain.versions import compare_versions, is_torch_version


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_a_name_that_is_not_here_says_what_to_use(name: str) -> None:
    assert name not in utils._PUBLIC
    for module in ("drivetrain", "drivetrain.utils"):
        with pytest.raises(ImportError, match=f"drivetrain has no {name}; use instead: "):
            exec(f"from {module} import {name}")


def test_the_table_names_nothing_that_is_not_there() -> None:
    """Whatever it advises to import from here can be imported."""
    import drivetrain

    advised = {
        word
        for text in INSTEAD.values()
        for word in (
            "gather_object",
            "broadcast_object_list",
            "convert_to_fp32",
            "find_batch_size",
            "clear_environment",
        )
        if word in text
    }
    assert len(advised) == 5
    assert all(hasattr(utils, word) for word in advised)
    assert hasattr(drivetrain, "ProfileKwargs")


# -------------------------------------------------------------------------------------------------- is it available?


def test_any_library_can_be_asked_for_without_importing_it() -> None:
    code = (
        "import sys\nfrom drivetrain.utils import is_yaml_available, is_no_such_library_available\n"
        "print(is_yaml_available(), is_no_such_library_available(), 'yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False", "False"]
    assert utils.is_yaml_available.__name__ == "is_yaml_available"


def test_devices_are_available_where_torch_can_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utils.is_cpu_available()
    assert utils.is_cuda_available() == torch.cuda.is_available()
    kind = type("Module", (), {})
    monkeypatch.setattr(torch, "get_device_module", lambda device: kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    assert (is_available("xpu"), is_available("mtia")) == (True, False)


def test_a_module_that_is_called_like_a_device_does_not_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xpu.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_available("xpu") == torch.xpu.is_available()


def test_plugins_and_families_of_precisions_count(site: Any) -> None:
    site.install_precision("tiny-a", "family = 'tiny'")
    site.install_backend("wide")
    assert (is_available("tiny"), is_available("wide"), is_available("narrow")) == (True, True, False)


def test_what_a_plugin_exports_under_such_a_name_is_its_own(site: Any) -> None:
    site.install(
        "extra",
        entry_points={"drivetrain.exports": {"is_fake_engine_available": "fake_export:answer"}},
        modules={"fake_export": "answer = 42"},
    )
    try:
        assert utils.is_fake_engine_available == 42
    finally:
        vars(utils).pop("is_fake_engine_available", None)
    assert registry.exports()


# --------------------------------------------------------------------------------------------------- small functions


def test_versions_compare_as_numbers() -> None:
    assert is_torch_version(">=", "2.9")
    assert not is_torch_version("<", "2.9")
    assert compare_versions("attrs", "!=", "0.1")
    with pytest.raises(ValueError, match="'~' is no comparison"):
        compare_versions("attrs", "~", "1")


def test_nested_settings_are_merged_in_place() -> None:
    lower = {"a": 1, "b": {"c": 1, "d": 2}, "e": 3}
    assert merge_dicts({"b": {"c": 9}, "e": {"f": 4}}, lower) is lower
    assert lower == {"a": 1, "b": {"c": 9, "d": 2}, "e": {"f": 4}}


def test_a_tuple_without_names_is_no_namedtuple() -> None:
    from collections import namedtuple

    assert is_namedtuple(namedtuple("Pair", "a b")(1, 2))
    assert not is_namedtuple((1, 2))


def test_ports_that_are_listened_on_are_in_use() -> None:
    import socket

    from drivetrain.utils import is_port_in_use

    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
    assert not is_port_in_use(port)


def test_a_model_compiled_in_place_or_wrapped_is_compiled() -> None:
    from torch import nn

    from drivetrain.utils import is_compiled_module

    plain, inside = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    inside[0].compile(backend="eager")
    assert not is_compiled_module(plain)
    assert not is_compiled_module(inside)
    assert is_compiled_module(inside[0])
    assert is_compiled_module(torch.compile(plain, backend="eager"))


def test_a_basic_file_of_settings_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.config import resolve
    from drivetrain.utils import write_basic_config

    monkeypatch.setenv("DRIVETRAIN_HOME", str(tmp_path))
    path = write_basic_config("bf16")
    assert path == tmp_path / "default_config.yaml"
    assert resolve(environment={"DRIVETRAIN_HOME": str(tmp_path)}).run.mixed_precision == "bf16"
    assert write_basic_config("no") is None
    assert resolve(environment={"DRIVETRAIN_HOME": str(tmp_path)}).run.mixed_precision == "bf16"
    assert write_basic_config(save_location=tmp_path / "other.yaml") == tmp_path / "other.yaml"
