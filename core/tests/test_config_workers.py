"""What workers read of the settings that their launcher resolved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.settings import Part, run
from drivetrain.config import Resolved, load_resolved
from drivetrain.config.values import Origin, from_python, plain
from drivetrain.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.fixture
def launched(tmp_path: Path, file: Path) -> dict[str, str]:
    """The environment of a worker, whose launcher had a file, a variable and a flag."""
    file.write_text("mixed_precision: no\nnum_processes: 4\npart: {mode: no, names: [no, a], nested: {a: 1e-5}}\n")
    resolved = run(file, {"num_processes": "2"}, environment={"DRIVETRAIN_PART__SIZE": "7", "DRIVETRAIN_TEE": "none"})
    resolved.dump(tmp_path / "resolved.json")
    # What a worker's own variables say is not asked: the launcher saw them.
    return {"DRIVETRAIN_RESOLVED": str(tmp_path / "resolved.json"), "DRIVETRAIN_TEE": "stdout", "DRIVETRAIN_ODD": "1"}


def test_workers_read_what_the_launcher_resolved_with_origins(file: Path, launched: dict[str, str]) -> None:
    resolved = run(environment=launched)
    assert (resolved.run.num_processes, resolved.run.tee) == (2, "none")
    assert resolved.config_file == str(file)
    assert resolved.section("part", Part) == Part(7, "no", {"a": 1e-5}, ["no", "a"])
    assert resolved.describe() == f"num_processes=2 (command line; {file}:2 said 4)"
    assert resolved.origin("part.mode").where == f"{file}:3:14"
    assert load_resolved(launched["DRIVETRAIN_RESOLVED"]).run == resolved.run


def test_arguments_in_code_win_in_workers(launched: dict[str, str]) -> None:
    resolved = run(code={"mixed_precision": "bf16"}, environment=launched)
    assert resolved.run.mixed_precision == "bf16"
    assert resolved.origin("mixed_precision").in_code


def test_a_file_named_in_code_cannot_change_the_world(tmp_path: Path, launched: dict[str, str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("mixed_precision: fp16\nnum_processes: 9\nnum_machines: 3\npart: {size: 1, mode: yes}\n")
    resolved = run(other, environment=launched)
    assert resolved.run.mixed_precision == "fp16"
    assert resolved.run.num_processes == 2
    assert resolved.section("part", Part).size == 7  # the launcher's environment ranks above any file
    assert resolved.section("part", Part).mode == "yes"
    assert f"{other}:2 said 9" in resolved.describe()


def test_a_launcher_inside_of_a_worker_resolves_anew(launched: dict[str, str]) -> None:
    del launched["DRIVETRAIN_ODD"]
    resolved = run(command_line={}, environment=launched)
    assert (resolved.run.num_processes, resolved.run.tee) == (None, "stdout")


def test_the_file_for_workers_is_json_one_setting_a_line_and_private(launched: dict[str, str]) -> None:
    path = Path(launched["DRIVETRAIN_RESOLVED"])
    data = json.loads(path.read_text())
    assert [len(layer) for layer in data["layers"]] == [5, 2, 1]
    assert len(path.read_text().splitlines()) == 8 + 2 * 3 + 2
    if os.name == "posix":
        assert path.stat().st_mode & 0o077 == 0


def test_objects_in_code_that_cannot_be_handed_on_are_named(tmp_path: Path) -> None:
    resolved = run(code={"part.size": object()})
    with pytest.raises(ConfigError, match=r"Accelerator\(...\): part.size: .* can't be handed to other processes"):
        resolved.dump(tmp_path / "resolved.json")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"drivetrain_settings": 99}', "not json", '{"drivetrain_settings": 1}']
)
def test_a_broken_file_for_workers_is_an_error_with_the_cure(tmp_path: Path, text: str) -> None:
    path = tmp_path / "resolved.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="the launcher sets that for its processes, unset it elsewhere"):
        run(environment={"DRIVETRAIN_RESOLVED": str(path)})
    with pytest.raises(ConfigError, match="unset it elsewhere"):
        run(environment={"DRIVETRAIN_RESOLVED": str(tmp_path / "absent")})


def test_a_file_for_workers_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        run().dump(tmp_path / "absent" / "resolved.json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_before_any_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"resolved.json: No space left on device"):
        run(command_line={"num_processes": "2"}).dump(tmp_path / "resolved.json")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.recursive(
            SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_size=4,
    )
)
def test_whatever_a_section_holds_reaches_the_workers_unchanged(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "resolved.json"
    resolved = Resolved(layers=(from_python({"part": data}, Origin("code")),))
    resolved.dump(path)
    loaded = load_resolved(path)
    assert plain(loaded.layers[0]) == plain(resolved.layers[0])
    assert loaded.describe() == resolved.describe()
