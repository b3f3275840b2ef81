"""Precedence and origins."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tests.settings import Part, run
from drivetrain.config import CompileConfig, Resolved, RunConfig, default_config_file, resolve
from drivetrain.config.schema import field_names, help_text
from drivetrain.config.sections import Sections
from drivetrain.config.values import Origin, Table, Value, from_python, merge, plain
from drivetrain.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


# ----------------------------------------------------------------------------------------------------------- precedence


@pytest.mark.parametrize("given_by", list(itertools.product([False, True], repeat=4)))
def test_the_source_of_highest_precedence_wins(file: Path, given_by: tuple[bool, ...]) -> None:
    in_file, in_environment, on_command_line, in_code = given_by
    file.write_text("num_processes: 2\n" if in_file else "debug: false\n")
    resolved = run(
        file,
        {"num_processes": 4} if on_command_line else None,
        {"num_processes": 5} if in_code else None,
        {"DRIVETRAIN_NUM_PROCESSES": "3"} if in_environment else None,
    )
    sources = ["default", f"{file}:1", "environment DRIVETRAIN_NUM_PROCESSES", "command line", "Accelerator(...)"]
    ranked = [
        (value, source)
        for value, source, present in zip([None, 2, 3, 4, 5], sources, (True, *given_by), strict=True)
        if present
    ]
    assert (resolved.run.num_processes, str(resolved.origin("num_processes"))) == ranked[-1]
    shadowed = [(row.shadowed, str(row.shadowed_origin)) for row in resolved.overridden()]
    assert shadowed == [(str(value), source) for value, source in reversed(ranked[1:-1])]


def test_sections_are_merged_key_by_key(file: Path) -> None:
    file.write_text("part:\n  size: 2\n  mode: yes\n  nested: {a: 1, b: 2}\n")
    resolved = run(file, {"part.nested.b": "3"}, {"part": {"size": 9}}, {"DRIVETRAIN_PART__NAMES": "[no]"})
    assert resolved.section("part", Part) == Part(9, "yes", {"a": 1.0, "b": 3.0}, ["no"])
    assert resolved.origin("part.mode").where == f"{file}:3:9"
    assert str(resolved.origin("part.nested.b")) == "command line"
    assert str(resolved.origin("part.absent")) == "default"
    assert {row.key: row.shadowed for row in resolved.overridden()} == {"part.size": "2", "part.nested.b": "2"}


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.one_of(st.integers(0, 3), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3), max_size=3)),
            max_size=3,
        ),
        max_size=4,
    )
)
def test_merging_layers_equals_updating_dicts(layers: list[dict[str, Any]]) -> None:
    expected: dict[str, Any] = {}
    merged = Value(Table(), Origin("default"))
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(expected.get(key), dict)
            expected[key] = {**expected[key], **value} if both else value
        merged = merge(merged, from_python(layer, Origin("code")))
    assert plain(merged) == expected


def test_none_on_the_command_line_or_in_code_means_not_given(file: Path) -> None:
    file.write_text("num_processes: 2\n")
    assert run(file, {"num_processes": None}, {"num_processes": None}).run.num_processes == 2


def test_null_in_text_resets_to_none(file: Path) -> None:
    file.write_text("num_processes: 2\npart: {size: 3}\n")
    resolved = run(file, {"num_processes": "null", "part": "null"})
    assert resolved.run.num_processes is None
    assert resolved.section("part", Part) == Part()


def test_the_log_line_tells_what_was_overridden(file: Path) -> None:
    file.write_text("\n\nmixed_precision: no\nnum_processes: 2\n")
    assert run(file).describe() == ""
    resolved = run(file, {"mixed_precision": "bf16", "num_processes": "2"})
    assert resolved.describe() == f"mixed_precision=bf16 (command line; {file}:3 said no)"
    resolved = run(file, {"mixed_precision": "fp16"}, {"mixed_precision": "bf16"})
    said = f"command line said fp16; {file}:3 said no"
    assert resolved.describe() == f"mixed_precision=bf16 (Accelerator(...); {said})"


# -------------------------------------------------------------------------------------------------------- core settings


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("mixed_precision: no", "mixed_precision", "no"),
        ("gpu_ids: 0", "gpu_ids", [0]),
        ("gpu_ids: 0,2", "gpu_ids", [0, 2]),
        ("gpu_ids: [1, 0]", "gpu_ids", [1, 0]),
        ("gpu_ids: all", "gpu_ids", "all"),
        ("gpu_ids: 0,0", "gpu_ids", [0, 0]),
        ("compile: true", "compile", CompileConfig()),
        ("compile: false", "compile", None),
        ("compile:", "compile", None),
        ("compile: {mode: max-autotune}", "compile", CompileConfig(mode="max-autotune")),
        ("main_process_port: 0", "main_process_port", 0),
        ("main_process_ip: 10.0.0.1", "main_process_ip", "10.0.0.1"),
        ("collective_timeout: 15", "collective_timeout", 15.0),
        ("tee: none", "tee", "none"),
    ],
)
def test_core_settings_are_read(file: Path, text: str, key: str, value: Any) -> None:
    file.write_text(text)
    resolved = run(file)
    assert getattr(resolved.run, key) == value
    assert resolved.value(key) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 0", "1:16: num_processes: must be at least 1, got 0"),
        ("num_processes: 2.0", "1:16: num_processes: expected a whole number, got the number 2.0"),
        ("num_processes: 1048577", "num_processes: must be at most 1048576, got 1048577"),
        ('log_dir: ""', "1:10: log_dir: must not be empty; null is the default"),
        ('main_process_ip: ""', "main_process_ip: must not be empty"),
        ("num_machines: 2\nmachine_rank: 2", "2:15: machine_rank: must be below num_machines, got 2 of 2"),
        ("main_process_port: 65536", "1:20: main_process_port: must be between 0 and 65535, got 65536"),
        ("collective_timeout: 0", "must be a finite number of seconds above 0, got 0"),
        ("collective_timeout: .inf", "must be a finite number of seconds above 0, got inf"),
        ("monitor_interval: .nan", "must be a finite number of seconds above 0, got nan"),
        ("gpu_ids: []", "gpu_ids: must name at least one device"),
        ("gpu_ids: GPU-8f2c", "gpu_ids: must be 'all' or numbers from 0, got 'GPU-8f2c'"),
        ("gpu_ids: [-1]", "gpu_ids: must be 'all' or numbers from 0, got [-1]"),
        ("log_level: loud", "is not a choice. Choices: debug, info, warning, error, critical"),
        ("compile: {mod: x}", "1:11: compile.mod: unknown key; did you mean 'mode'?"),
        ("compile: {mode: x, options: {}}", "1:17: compile.mode: and options exclude each other"),
        ("mixed_precison: no", "1:1: mixed_precison: unknown key; did you mean 'mixed_precision'?"),
        ("prat: {}", "1:1: prat: unknown key; did you mean 'part'?"),
        ("zzz: 1", "1:1: zzz: unknown key; settings: backend, mixed_precision,"),
        ("part.size: 1", "1:1: part.size: unknown key; dots are for the command line, in a file 'size' stands in the"),
        ("compile.mode: x", "in a file 'mode' stands in the section 'compile'"),
        ("bigpart: {}", 'no plugin of this name is installed; to have it: pip install "drivetrain[bigpart]"'),
        ("part: 3", "1:7: part: a plugin's section is a mapping of its settings, got the number 3"),
    ],
)
def test_wrong_settings_are_refused_with_position_and_cure(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        run(file)
    assert message.replace("compile.mode: and", "compile.mode: mode and") in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_problems_of_all_sources_come_in_one_error(file: Path) -> None:
    file.write_text("num_processes: no\ndebug: 1\n")
    with pytest.raises(ConfigError) as caught:
        run(file, {"tee": "x"}, {"gradient_accumulation_steps": 0, "device": 3}, {"DRIVETRAIN_MAX_RESTARTS": "a"})
    text = str(caught.value)
    assert text.startswith("6 problems")
    for key in ("1:16: num_processes", "2:8: debug", "command line: tee", "Accelerator(...): device"):
        assert key in text
    assert "Accelerator(...): gradient_accumulation_steps: must be at least 1, got 0" in text
    assert "environment DRIVETRAIN_MAX_RESTARTS: max_restarts: expected a whole number" in text


def test_faults_of_every_kind_in_one_file_have_a_line_each(file: Path) -> None:
    text = "debug: 1\nnmu_processes: 2\ntee: al\nnum_machines: 0\nmixed_precision: bf61\nfp16:\n  init_scale: big\n"
    file.write_text(text + "  growth_factor: 0.5\n  speed: 3\n")
    with pytest.raises(ConfigError) as caught:
        resolve(file, environment={})
    head, *lines = str(caught.value).splitlines()
    assert head == "8 problems in the settings:"
    told = [line.strip().removeprefix(f"{file}:") for line in lines]
    for line, start in zip(
        told,
        [
            "1:8: debug: expected true or false, got the number 1",
            "2:1: nmu_processes: unknown key; did you mean 'num_processes'?",
            "3:6: tee: the text 'al' is not a choice; did you mean 'all'?",
            "4:15: num_machines: must be at least 1, got 0",
            "5:18: no precision 'bf61'; did you mean 'bf16'?",
            "7:15: fp16.init_scale: expected a number, got the text 'big'",
            "8:18: fp16.growth_factor: must be > 1.0: 0.5",
            "9:3: fp16.speed: unknown key; known: output,",
        ],
        strict=True,
    ):
        assert line.startswith(start)


def test_a_section_that_is_no_mapping_is_told_once(file: Path) -> None:
    file.write_text("fp16: 3\n")
    with pytest.raises(ConfigError) as caught:
        resolve(file, environment={})
    assert str(caught.value) == f"{file}:1:7: fp16: a plugin's section is a mapping of its settings, got the number 3"


def test_a_wrong_value_is_an_error_even_if_a_better_source_hides_it(file: Path) -> None:
    file.write_text("num_processes: many\npart: {size: big}\n")
    with pytest.raises(ConfigError, match=r"1:16: num_processes: expected a whole number"):
        run(file, {"num_processes": 2})
    file.write_text("part: {size: big}\n")
    with pytest.raises(ConfigError, match=r"1:14: part.size: expected a whole number"):
        run(file, {"part.size": 2}).section("part", Part)


def test_sections_of_other_installed_plugins_are_left_alone(file: Path) -> None:
    file.write_text("part: {whatever: 1}\n")
    assert run(file).sections() == ("part",)


def test_the_registry_is_asked_only_if_there_is_a_section(file: Path) -> None:
    def never() -> Sections:
        raise AssertionError

    file.write_text("num_processes: 2\n")
    assert resolve(file, environment={}, sections=never).run.num_processes == 2


def test_every_setting_has_a_default_and_a_sentence_of_help() -> None:
    assert RunConfig().mixed_precision == "no"
    for name in field_names():
        assert help_text(name)[0].isupper() or help_text(name)[0].isdigit()
        assert help_text(name).endswith(".")


def test_the_origin_of_a_mapping_is_the_best_source_that_gave_a_part_of_it(file: Path) -> None:
    def shown(resolved: Resolved) -> tuple[str, str]:
        return next((row.text, str(row.origin)) for row in resolved.rows() if row.key == "compile")

    file.write_text("compile: {}\n")
    text = "{backend: null, mode: null, fullgraph: false, dynamic: null, options: null}"
    assert shown(run(file)) == (text, f"{file}:1")
    file.write_text("compile: {mode: default, fullgraph: true}\n")
    assert shown(run(file, {"compile.mode": "max"}))[1] == "command line"
    assert run(file, {"compile.mode": "max"}).describe() == f"compile.mode=max (command line; {file}:1 said default)"


def test_values_of_sections_come_from_the_built_section(file: Path) -> None:
    file.write_text("part: {mode: no, nested: {a: 1}}\n")
    resolved = run(file)
    assert resolved.value("part.mode") is False  # nobody knows better yet
    resolved.section("part", Part)
    assert resolved.value("part.mode") == "no"
    assert resolved.value("part.size") == 1
    assert resolved.value("part.nested.a") == 1.0
    assert resolved.value("compile.mode") is None


# ---------------------------------------------------------------------------------------------------------- environment


def test_variables_reach_nested_keys_and_names_with_dashes() -> None:
    resolved = run(environment={"DRIVETRAIN_FP8_X__SIZE": "3", "DRIVETRAIN_COMPILE__MODE": "default"})
    assert resolved.section("fp8-x", Part).size == 3
    assert resolved.run.compile == CompileConfig(mode="default")


def test_the_variable_of_a_section_takes_the_whole_of_it() -> None:
    assert run(environment={"DRIVETRAIN_FP8_X": "{size: 3}"}).section("fp8-x", Part).size == 3
    with pytest.raises(ConfigError, match=r"environment DRIVETRAIN_PART: part: a plugin's section is a mapping of its"):
        run(environment={"DRIVETRAIN_PART": "3"})


def test_an_empty_variable_is_not_set() -> None:
    assert run(environment={"DRIVETRAIN_NUM_PROCESSES": ""}).run.num_processes is None


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False), ("true", True), ("off", False)])
def test_switches_in_the_environment_may_be_one_and_zero(text: str, value: bool) -> None:
    assert run(environment={"DRIVETRAIN_DEBUG": text}).run.debug is value


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_a_warning() -> None:
    with pytest.raises(ConfigError, match=r"environment DRIVETRAIN_MIXED_PRECISON: .*did you mean 'mixed_precision'"):
        run(environment={"DRIVETRAIN_MIXED_PRECISON": "bf16"})
    with pytest.raises(ConfigError, match=r"no section 'prat'; did you mean 'part'"):
        run(environment={"DRIVETRAIN_PRAT__SIZE": "3"})
    with pytest.warns(UserWarning, match="DRIVETRAIN_XYZ: no setting of this name, ignored"):
        run(environment={"DRIVETRAIN_XYZ": "3"})


def test_the_environment_is_never_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("num_processes: 2\n")
    monkeypatch.setenv("DRIVETRAIN_CONFIG", str(file))
    before = dict(os.environ)
    assert resolve(command_line={}).run.num_processes == 2
    assert dict(os.environ) == before


@pytest.mark.parametrize("key", ["part..size", ".part", "part.", ""])
def test_a_key_with_an_empty_part_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="a key is names with dots between them"):
        run(command_line={key: "1"})


def test_a_broken_list_on_the_command_line_is_named() -> None:
    with pytest.raises(ConfigError, match=r"command line: part.names: '\[a, b' is not valid"):
        run(command_line={"part.names": "[a, b"})


# ----------------------------------------------------------------------------------------------------------- which file


def test_a_named_file_wins_over_the_variable_and_that_over_the_default(tmp_path: Path) -> None:
    for name, number in {"named.yaml": 1, "variable.yaml": 2, "default_config.yaml": 3}.items():
        (tmp_path / name).write_text(f"num_processes: {number}\n")
    environment = {"DRIVETRAIN_HOME": str(tmp_path), "DRIVETRAIN_CONFIG": str(tmp_path / "variable.yaml")}
    assert run(tmp_path / "named.yaml", environment=environment).run.num_processes == 1
    resolved = run(environment=environment)
    assert (resolved.run.num_processes, resolved.config_file) == (2, environment["DRIVETRAIN_CONFIG"])
    assert run(environment={"DRIVETRAIN_HOME": str(tmp_path)}).run.num_processes == 3


def test_a_file_named_by_the_variable_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"/absent.yaml \(named by DRIVETRAIN_CONFIG\) does not exist"):
        run(environment={"DRIVETRAIN_CONFIG": "/absent.yaml"})


def test_the_default_folder_follows_home_and_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_config_file({}) == tmp_path / ".config" / "drivetrain" / "default_config.yaml"
    assert default_config_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/drivetrain/default_config.yaml")
    assert (
        default_config_file({"XDG_CONFIG_HOME": "/x", "DRIVETRAIN_HOME": "~/y"}) == tmp_path / "y/default_config.yaml"
    )


@pytest.mark.parametrize("name", ["DRIVETRAIN_CONFIG", "DRIVETRAIN_HOME", "XDG_CONFIG_HOME"])
def test_the_home_of_nobody_is_a_folder_that_is_not_there(name: str) -> None:
    environment = {name: "~no-such-user/place"}
    assert default_config_file(environment).name == "default_config.yaml"
    if name == "DRIVETRAIN_CONFIG":
        with pytest.raises(ConfigError, match=r"~no-such-user/place \(named by DRIVETRAIN_CONFIG\) does not exist"):
            resolve(environment=environment)
    else:
        assert resolve(environment=environment).config_file is None


def test_a_file_with_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="has an empty name"):
        run("")


def test_the_json_twin_is_found_and_yaml_wins(tmp_path: Path) -> None:
    environment = {"DRIVETRAIN_HOME": str(tmp_path)}
    assert run(environment=environment).config_file is None
    (tmp_path / "default_config.json").write_text('{"num_processes": 2}')
    assert run(environment=environment).run.num_processes == 2
    (tmp_path / "default_config.yaml").write_text("num_processes: 3")
    assert run(environment=environment).run.num_processes == 3


def test_a_default_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "default_config.yaml").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="does not exist"):
        run(environment={"DRIVETRAIN_HOME": str(tmp_path)})
