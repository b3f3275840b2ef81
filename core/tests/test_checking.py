"""All that is wrong with settings is told at once, wherever the first of it is met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import Accelerator
from drivetrain.checking import engines_missing, problems_of, telling_all
from drivetrain.config import Resolved, resolve
from drivetrain.errors import ConfigError, DrivetrainError, PluginNotFoundError
from drivetrain.launch import launch_script
from drivetrain.launch.script import ready

WRONG = "backend: snigle\ndevice: abacus\nmixed_precision: bf61\nbf16: {output: float61}\nfp16: {init_scale: -1}\n"
TOLD = [
    "1:10: no backend 'snigle'; did you mean 'single'?",
    "2:9: no device 'abacus'",
    "3:18: no precision 'bf61'; did you mean 'bf16'?",
    "4:16: bf16.output: the text 'float61' is not a choice; did you mean 'bfloat16'?",
    "5:20: fp16.init_scale: must be above 0, got -1.0",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(WRONG)
    return file


def check(error: BaseException, file: Path) -> None:
    head, *lines = str(error).splitlines()
    assert head == "5 problems in the settings:"
    for line, start in zip(lines, TOLD, strict=True):
        assert line.startswith(f"  {file}:{start}")


@pytest.mark.usefixtures("fresh_run")
def test_a_script_is_told_everything_that_is_wrong_in_its_file(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(config_file=file)
    check(caught.value, file)


def test_a_launcher_is_told_everything_before_a_process_starts(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(9)")
    with pytest.raises(ConfigError) as caught:
        launch_script(script, config_file=file)
    check(caught.value, file)


def test_a_single_problem_keeps_its_own_error(file: Path) -> None:
    file.write_text("mixed_precision: bf61\n")
    with pytest.raises(PluginNotFoundError, match="did you mean 'bf16'"), telling_all(resolve(file, environment={})):
        raise PluginNotFoundError("no precision 'bf61'; did you mean 'bf16'?")


@pytest.mark.parametrize("error", [ConfigError("another matter"), DrivetrainError("no matter of settings")])
def test_errors_about_something_else_are_left_alone(file: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, telling_all(resolve(file, environment={})):
        raise error
    assert caught.value is error


def test_a_section_of_a_plugin_that_is_not_chosen_does_no_harm_alone(file: Path, open_site: Any) -> None:
    open_site.install_backend("wide", module="raise OSError('no library')")
    file.write_text("wide: {depth: 3}\n")
    resolved: Resolved = resolve(file, environment={})
    with telling_all(resolved):
        pass


def test_a_mistake_in_the_section_of_a_plugin_that_is_not_chosen_is_told_too(tmp_path: Path) -> None:
    file, script = tmp_path / "c.yaml", tmp_path / "script.py"
    file.write_text("mixed_precision: bf16\nfp16: {init_scael: 1}\n")
    script.write_text("raise SystemExit(9)")
    with pytest.raises(ConfigError, match=r"c.yaml:2:8: fp16.init_scael: unknown key; did you mean 'init_scale'"):
        launch_script(script, config_file=file)


def test_a_setting_on_the_command_line_that_has_no_effect_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    settings = {"mixed_precision": "bf16", "num_processes": 1, "fp16.init_scale": 2.0, "bf16.output": "bfloat16"}
    notes = ready(resolve(command_line=settings, environment={}), str(script)).notes
    assert notes == ("fp16.init_scale (command line) has no effect: fp16 takes no part in this run",)


def test_settings_of_other_plugins_in_a_file_are_nobodys_business(tmp_path: Path) -> None:
    file, script = tmp_path / "c.yaml", tmp_path / "script.py"
    file.write_text("num_processes: 1\nfp16: {init_scale: 2}\n")
    script.write_text("")
    assert ready(resolve(file, environment={}), str(script)).notes == ()


def test_the_section_of_a_plugin_without_its_engine_is_checked_as_any(site: Any, tmp_path: Path) -> None:
    site.install_backend(
        "alpha", "import attrs\nrequires = ('no-such-engine-xyz>=1',)\n@attrs.frozen\nclass Config: x: int = 0"
    )
    file = tmp_path / "c.yaml"
    file.write_text("alpha: {x: 1}\n")
    assert problems_of(resolve(file, environment={})) == []
    file.write_text("alpha: {y: 1}\n")
    (problem,) = problems_of(resolve(file, environment={}))
    assert "alpha.y: unknown key" in problem


# ------------------------------------------------------------------------------------------------------------- engines

NO_ENGINE = "requires = ('no-such-engine-xyz>=1',)\n"
LACKS = "needs no-such-engine-xyz>=1, which is not installed"


@pytest.mark.parametrize(
    ("text", "where"),
    [("backend: alpha\n", ":1:10"), ("mixed_precision: narrow-a\n", ":1:18"), ("mixed_precision: narrow\n", ":1:18")],
)
def test_a_chosen_plugin_without_its_engine_is_told_apart_from_problems(
    site: Any, tmp_path: Path, text: str, where: str
) -> None:
    site.install_backend("alpha", NO_ENGINE)
    site.install_precision("narrow-a", f"{NO_ENGINE}family = 'narrow'")
    file = tmp_path / "c.yaml"
    file.write_text(text)
    resolved = resolve(file, environment={})
    assert problems_of(resolved) == []
    (message,) = engines_missing(resolved)
    assert message.startswith(f"{file}{where}: ")
    assert LACKS in message


def test_a_family_with_one_engine_lacks_none(site: Any, tmp_path: Path) -> None:
    site.install_precision("narrow-a", f"{NO_ENGINE}family = 'narrow'")
    site.install_precision("narrow-b", "family = 'narrow'")
    file = tmp_path / "c.yaml"
    file.write_text("mixed_precision: narrow\n")
    assert problems_of(resolve(file, environment={})) == engines_missing(resolve(file, environment={})) == []


def test_a_plugin_that_is_named_and_broken_is_a_problem_also_without_a_section(site: Any, tmp_path: Path) -> None:
    site.install_backend("alpha", module="raise OSError('no library')")
    file = tmp_path / "c.yaml"
    for text in ("backend: alpha\n", "backend: alpha\nalpha: {x: 1}\n"):
        file.write_text(text)
        (problem,) = problems_of(resolve(file, environment={}))
        assert problem.startswith(f"{file}:1:10: backend 'alpha' (alpha-dist 1.0) can't be used")
        assert "OSError: no library" in problem


def test_several_processes_that_no_installed_backend_takes_are_a_problem(site: Any, tmp_path: Path) -> None:
    site.install_backend("alpha")
    file = tmp_path / "c.yaml"
    file.write_text("num_processes: 2\n")
    (problem,) = problems_of(resolve(file, environment={}))
    assert problem.startswith(f"{file}:1:16: several processes need a backend that distributes over them")
    file.write_text("num_processes: 2\nbackend: alpha\n")
    assert problems_of(resolve(file, environment={})) == []
