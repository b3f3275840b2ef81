"""The commands, as a user types them. None of these starts a process of its own, but for what imports are measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from drivetrain.builtin import Single
from drivetrain.cli import main
from drivetrain.cli.options import command_line, option, setting_option
from drivetrain.config import resolve
from drivetrain.errors import ConfigError, PluginError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the default file, and no settings from anywhere else."""
    for name in ("DRIVETRAIN_CONFIG", "DRIVETRAIN_DEBUG", "DRIVETRAIN_RESOLVED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRIVETRAIN_HOME", str(tmp_path))
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="drivetrain")


def settings(result: Result) -> dict[str, dict[str, object]]:
    return {row["key"]: row for row in json.loads(result.stdout)["settings"]}


# ------------------------------------------------------------------------------------------------------- the program


def test_help_and_version_are_there() -> None:
    assert "launch" in invoke("--help").output
    assert invoke("--version").output.startswith("drivetrain ")


@pytest.mark.parametrize("command", ["config", "plugins", "doctor", "merge-weights", "new-plugin", "env"])
def test_every_listed_command_exists_and_has_help(command: str) -> None:
    assert invoke(command, "--help").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plugins"], ["plugins", "--json"], ["config", "show"], ["config", "check"]]
)
def test_commands_that_only_look_do_not_import_torch(home: Path, arguments: list[str]) -> None:
    program = (
        "import sys\nfrom drivetrain.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
        f"assert {arguments != ['--help']!r} or not {{'rich', 'yaml', 'pluggy'}} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_dash_m_is_the_same_program(home: Path) -> None:
    command = [sys.executable, "-m", "drivetrain", "config", "check", str(home / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"Error: config file {home / 'absent.yaml'} does not exist\n"


@pytest.mark.parametrize(("error", "code"), [(ConfigError("wrong"), 2), (PluginError("broken"), 1)])
def test_our_errors_are_one_message_and_an_exit_code(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("drivetrain.config.resolve", fail)
    result = invoke("config", "show")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"Error: {error}\n")
    monkeypatch.setenv("DRIVETRAIN_DEBUG", "1")
    assert invoke("config", "show").exception is error


# ------------------------------------------------------------------------------------------------------------- flags


@click.command()
@option("--some_flag", "-s", "some_flag")
@setting_option("num_processes")
@setting_option("check_collectives")
@setting_option("debug")
def probe(**flags: object) -> None:
    click.echo(json.dumps(command_line(flags)))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num_processes", "2", "--no_check_collectives", "--debug"],
        ["--num-processes", "2", "--no-check-collectives", "--debug"],
        ["--num-processes=2", "--no_check_collectives", "--debug"],
    ],
)
def test_both_spellings_of_every_flag_mean_the_same(arguments: list[str]) -> None:
    result = CliRunner().invoke(probe, arguments)
    assert json.loads(result.output) == {"num_processes": "2", "check_collectives": False, "debug": True}


def test_flags_not_given_are_no_settings() -> None:
    assert json.loads(CliRunner().invoke(probe, []).output) == {}


def test_help_lists_each_flag_once() -> None:
    text = CliRunner().invoke(probe, ["--help"]).output
    assert "--num_processes NUMBER" in text
    assert "num-processes" not in text
    assert "--check_collectives / --no_check_collectives" in text


def test_set_reaches_every_key_and_refuses_nonsense() -> None:
    assert command_line({"a": None}, ["b.c=x=y", "d="]) == {"b.c": "x=y", "d": ""}
    assert command_line({"a": "1"}, ["a=1"]) == {"a": "1"}
    with pytest.raises(click.BadParameter, match="'b' is no KEY=VALUE"):
        command_line({}, ["b"])
    with pytest.raises(click.BadParameter, match="a is given twice: '1' and '2'"):
        command_line({"a": "1"}, ["a=2"])


# -------------------------------------------------------------------------------------------------------- config show


def test_show_tells_value_and_origin_of_every_setting(home: Path) -> None:
    file = home / "default_config.yaml"
    file.write_text("mixed_precision: no\nnum_processes: 2\n")
    rows = settings(invoke("config", "show", "--json", "--set", "mixed_precision=bf16"))
    overridden = [{"value": "no", "origin": f"{file}:1"}]
    assert rows["mixed_precision"] == {
        "key": "mixed_precision",
        "value": "bf16",
        "origin": "command line",
        "overridden": overridden,
    }
    assert (rows["num_processes"]["value"], rows["num_processes"]["origin"]) == (2, f"{file}:2")
    assert (rows["device"]["value"], rows["device"]["origin"]) == ("auto", "default")
    table = invoke("config", "show", "--set", "mixed_precision=bf16").stdout
    assert f"command line; {file}:1 said no" in table


def test_show_reports_plugins_and_sections_that_do_not_fit_below_the_values(home: Path) -> None:
    file = home / "c.yaml"
    file.write_text("backend: snigle\nmixed_precision: bf61\ndevice: abacus\nsingle: {speed: 3}\n")
    result = invoke("config", "show", "--config_file", str(file))
    assert result.exit_code == 2
    for key, value, line in (("backend", "snigle", 1), ("mixed_precision", "bf61", 2), ("single.speed", "3", 4)):
        assert re.search(rf"{key} +{value} +{re.escape(str(file))}:{line}", result.stdout)
    first, second, third, fourth = result.stderr.splitlines()
    assert first.startswith(f"Error: {file}:1:10: no backend 'snigle'; did you mean 'single'?")
    assert second.startswith(f"Error: {file}:3:9: no device 'abacus'")
    assert third.startswith(f"Error: {file}:2:18: no precision 'bf61'; did you mean 'bf16'?")
    assert fourth == f"Error: {file}:4:10: single.speed: unknown key; known: none, it has no settings"


WIDE = """
import attrs, enum
from drivetrain.plugin import Backend

class Mode(enum.Enum):
    FAST = "fast"

@attrs.frozen
class Inner:
    rate: float = 0.5

@attrs.frozen
class WideConfig:
    depth: int = 2
    inner: Inner = Inner()
    mode: Mode = Mode.FAST

class Plug(Backend):
    api = (1, 0)
    Config = WideConfig
"""


def test_show_lists_every_key_of_the_plugins_that_are_chosen(home: Path, open_site: Any) -> None:
    open_site.install_backend("wide", module=WIDE)
    flags = ["--set", "backend=wide", "--set", "wide.inner.rate=0.1", "--set", "mixed_precision=fp16"]
    rows = settings(invoke("config", "show", "--json", *flags))
    shown = {key: (row["value"], row["origin"]) for key, row in rows.items() if key.startswith("wide.")}
    assert shown == {
        "wide.depth": (2, "default"),
        "wide.inner.rate": (0.1, "command line"),
        "wide.mode": ("fast", "default"),
    }
    assert (rows["fp16.init_scale"]["value"], rows["fp16.init_scale"]["origin"]) == (65536.0, "default")
    assert not [key for key in rows if key.startswith("bf16.")]
    table = invoke("config", "show", *flags).stdout
    assert re.search(r"wide\.depth +2 +default", table)
    assert re.search(r"wide\.mode +fast +default", table)


def test_show_lists_the_keys_of_a_section_in_which_something_is_wrong(home: Path) -> None:
    result = invoke("config", "show", "--json", "--set", "fp16.init_scale=big")
    rows = settings(result)
    assert (rows["fp16.init_scale"]["value"], rows["fp16.growth_factor"]["value"]) == ("big", 2.0)
    assert json.loads(result.stdout)["problems"] == [
        "command line: fp16.init_scale: expected a number, got the text 'big'"
    ]


def test_show_lists_the_keys_of_the_backend_that_several_processes_get(home: Path, site: Any) -> None:
    source = "import attrs\nfrom drivetrain.plugin import *\nclass Plug(Backend):\n    api = (1, 0)\n"
    source += "    default_for_many = True\n    Config = attrs.make_class('C', {'depth': attrs.field(default=2)})\n"
    site.install_backend("wide", module=source)
    assert settings(invoke("config", "show", "--json", "--set", "num_processes=2"))["wide.depth"]["value"] == 2
    assert "wide.depth" not in settings(invoke("config", "show", "--json"))


def test_show_has_the_problems_in_json_too(home: Path) -> None:
    result = invoke("config", "show", "--json", "--set", "backend=snigle")
    assert result.exit_code == 2
    assert settings(result)["backend"]["value"] == "snigle"
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.startswith("command line: no backend 'snigle'")
    assert json.loads(invoke("config", "show", "--json").stdout)["problems"] == []


@pytest.mark.parametrize("flag", ["--config_file", "--config-file", "--config"])
def test_the_file_can_be_named_in_three_spellings(home: Path, flag: str) -> None:
    (home / "other.yaml").write_text("num_processes: 3\n")
    assert settings(invoke("config", "show", "--json", flag, str(home / "other.yaml")))["num_processes"]["value"] == 3


# ------------------------------------------------------------------------------------------------------- config check


def test_check_reports_everything_wrong_in_a_file(home: Path) -> None:
    file = home / "c.yaml"
    file.write_text("backend: nonsense\nmixed_precision: bf61\ndevice: cpu\n")
    result = invoke("config", "check", str(file))
    assert result.exit_code == 2
    assert f"{file}:1:10: no backend 'nonsense'" in result.stderr
    assert f"{file}:2:18: no precision 'bf61'; did you mean 'bf16'" in result.stderr
    assert "cpu" not in result.stderr.replace("Installed: cpu", "")


def test_check_builds_the_sections_of_installed_plugins(home: Path) -> None:
    file = home / "c.yaml"
    file.write_text("single: {speed: 3}\n")
    result = invoke("config", "check", str(file))
    assert result.exit_code == 2
    assert f"{file}:1:10: single.speed: unknown key; known: none, it has no settings" in result.stderr


def test_check_passes_a_good_file_and_ignores_this_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_NUM_PROCESSES", "nonsense")
    assert invoke("config", "check").stdout == "there is no config file; all settings are defaults\n"
    (home / "default_config.yaml").write_text("backend: single\nmixed_precision: no\n")
    assert invoke("config", "check").stdout == f"{home / 'default_config.yaml'}: no problem found\n"


# ----------------------------------------------------------------------------------------------------- config default


def test_plain_config_writes_the_defaults_without_a_question(home: Path) -> None:
    result = invoke("config")
    assert result.stdout == f"wrote {home / 'default_config.yaml'}\n"
    resolved = resolve(environment={"DRIVETRAIN_HOME": str(home)})
    assert all(str(row.origin) == "default" for row in resolved.rows())


def test_every_commented_line_of_the_written_file_is_the_default(home: Path) -> None:
    invoke("config")
    file = home / "default_config.yaml"
    lines = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    keys = {row.key for row in resolve(environment={}).rows()}
    file.write_text("\n".join(line for line in lines if line.split(":")[0] in keys and " " not in line.split(":")[0]))
    rows = resolve(environment={"DRIVETRAIN_HOME": str(home)}).rows()
    assert all(row.origin.source == "file" for row in rows)
    assert [row.value for row in rows] == [
        row.value for row in resolve(environment={"DRIVETRAIN_HOME": "/none"}).rows()
    ]


def test_default_writes_what_was_chosen(home: Path) -> None:
    file = home / "deep" / "c.yaml"
    arguments = ["--num-processes", "2", "--mixed_precision", "no", "--no_check_collectives", "--log_dir", "2024"]
    arguments += [
        "--set",
        "compile.mode=default",
        "--set",
        "single.word=no",
        "--set",
        "single.list=[off, 'x: y', 1e-5]",
    ]
    assert invoke("config", "default", "--config_file", str(file), *arguments).exit_code == 0
    resolved = resolve(file, environment={})
    run = resolved.run
    assert (run.num_processes, run.mixed_precision, run.check_collectives, run.log_dir) == (2, "no", False, "2024")
    assert run.compile is not None
    assert run.compile.mode == "default"
    shown = {row.key: row.text for row in resolved.rows()}
    assert (shown["single.word"], shown["single.list"]) == ("no", "[off, x: y, 1.0e-05]")


def test_default_replaces_a_file_only_when_told_to(home: Path) -> None:
    file = home / "default_config.json"
    file.write_text('{"num_processes": 7}')
    refused = invoke("config", "default")
    assert (refused.exit_code, file.read_text()) == (2, '{"num_processes": 7}')
    assert "exists already; --overwrite replaces it" in refused.stderr
    assert invoke("config", "default", "--num_processes", "2", "--overwrite").exit_code == 0
    assert resolve(environment={"DRIVETRAIN_HOME": str(home)}).run.num_processes == 2


def test_default_refuses_wrong_values_and_writes_nothing(home: Path) -> None:
    result = invoke("config", "default", "--num_processes", "four", "--set", "nonsense=1")
    assert result.exit_code == 2
    assert "nonsense: unknown key" in result.stderr
    result = invoke("config", "default", "--num_processes", "four")
    assert "command line: num_processes: expected a whole number, got the text 'four'" in result.stderr
    assert list(home.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home / "default_config.yaml"
    file.write_text("num_processes: 7\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    result = invoke("config", "default", "--overwrite")
    assert (result.exit_code, file.read_text()) == (2, "num_processes: 7\n")
    assert "No space left on device" in result.stderr
    assert [path.name for path in home.iterdir()] == ["default_config.yaml"]


# -------------------------------------------------------------------------------------------------------- plugins, env


def test_plugins_lists_what_core_itself_offers() -> None:
    rows = json.loads(invoke("plugins", "--json").stdout)
    found = {(row["role"], row["name"]) for row in rows}
    assert {("backend", "single"), ("device", "cpu"), ("precision", "bf16")} <= found
    (described,) = (row["description"] for row in rows if row["name"] == "single")
    assert described == next(iter((Single.__doc__ or "").splitlines()))
    verbose = json.loads(invoke("plugins", "--json", "--verbose").stdout)
    assert all(row["description"] for row in verbose if row["distribution"] == "drivetrain")


@pytest.mark.parametrize("columns", [None, 80])
def test_plugins_fit_a_page_and_no_name_is_cut(monkeypatch: pytest.MonkeyPatch, columns: int | None) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    table = invoke("plugins").stdout
    assert max(map(len, table.splitlines())) <= (columns or 100)
    for row in json.loads(invoke("plugins", "--json").stdout):
        assert re.search(rf"{row['role']} +{row['name']} +{row['distribution']} {row['version']} ", table)


def test_env_shows_versions_devices_and_settings_without_secrets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_SINGLE__API_KEY", "secret")
    result = invoke("env", "--json", "--set", "num_processes=2")
    facts = json.loads(result.stdout)
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["num_processes"] == "2 (command line)"
    assert facts["config file"] == "none"
    assert {"torch", "accelerator", "platform"} <= facts.keys()
    assert "secret" not in result.output


def test_env_survives_wrong_settings(home: Path) -> None:
    facts = json.loads(invoke("env", "--json", "--set", "num_processes=x").stdout)
    assert facts["settings"].startswith("wrong: command line: num_processes")


def test_a_world_that_was_stopped_from_outside_is_not_called_broken(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drivetrain.launch import script

    monkeypatch.setattr(script, "run", lambda prepared, resolved: (143, None))  # as after SIGTERM
    result = invoke("test", "--num_processes", "2", "--backend", "ddp", "--cpu")
    assert result.exit_code == 143
    assert "does not work" not in result.output
