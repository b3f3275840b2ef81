"""The commands, as a user types them. None of these starts a process of its own, but for what imports are measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
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
    (home / "default_config.yaml").write_text("backend: ddp\nnum_processes: 2\nddp: {bucket_cap_mb: 5}\n")
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


@pytest.mark.parametrize(
    ("word", "said"), [("luanch", "did you mean 'launch'?"), ("zzz", "there are: launch, config,")]
)
def test_a_command_that_is_none_is_told_the_nearest_or_all(word: str, said: str) -> None:
    result = invoke(word)
    assert result.exit_code == 2
    assert f"no such command: {word}; {said}" in result.stderr


def test_a_disk_that_is_full_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drivetrain.config.resolve", full)
    result = invoke("config", "show")
    assert (result.exit_code, result.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_warnings_are_shown_without_the_line_of_the_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_NOBODYS", "1")
    result = invoke("config", "show")
    assert result.exit_code == 0
    assert result.stderr == "Warning: environment DRIVETRAIN_NOBODYS: no setting of this name, ignored\n"


def test_no_color_is_asked_for_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.doctor.examine_all", lambda timeout: (row for row in ()))
    for variable, color in ((None, True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", variable) if variable else monkeypatch.delenv("NO_COLOR", raising=False)
        with main.make_context("drivetrain", ["doctor"], color=True) as ctx:
            main.invoke(ctx)
            assert ctx.color is color


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


def test_the_same_said_twice_is_no_contradiction() -> None:
    assert command_line({"debug": True, "rate": "0.5"}, ["debug=true", "rate=.5"]) == {"debug": "true", "rate": ".5"}
    assert command_line({}, ["rate=.nan", "rate=.nan"]) == {"rate": ".nan"}
    result = CliRunner().invoke(probe, ["--num_processes", "2", "--num-processes", "2"])
    assert json.loads(result.output) == {"num_processes": "2"}


def test_a_flag_given_twice_with_two_values_is_refused() -> None:
    result = CliRunner().invoke(probe, ["--num_processes", "2", "--num-processes=3"])
    assert result.exit_code == 2
    assert "is given twice: '2' and '3'" in result.stderr
    assert invoke("config", "show", "--config", "a.yaml", "--config_file", "b.yaml").exit_code == 2


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


def test_show_says_where_the_default_file_would_be(home: Path) -> None:
    file = home / "default_config.yaml"
    assert invoke("config", "show").stdout.startswith(f"config file: none; the default would be {file}\n")
    file.touch()
    assert invoke("config", "show").stdout.startswith(f"config file: {file}\n")


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


def test_json_is_json_whatever_plugins_print_and_numbers_are(home: Path, open_site: Any) -> None:
    noisy = "import attrs\nprint('hello from a vendor')\nfrom drivetrain.plugin import *\nclass Plug(Backend):\n"
    noisy += "    api = (1, 0)\n    Config = attrs.make_class('C', {'rate': attrs.field(type=float, default=1.0)})\n"
    open_site.install_backend("noisy", module=noisy)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    result = invoke("config", "show", "--json", "--set", "backend=noisy", "--set", "noisy.rate=-.inf")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout, parse_constant=refuse)["settings"]
    assert next(row["value"] for row in rows if row["key"] == "noisy.rate") == "-.inf"
    assert "hello from a vendor" in result.stderr


def test_show_and_check_tell_of_an_engine_that_is_missing_here_without_failing(home: Path, open_site: Any) -> None:
    open_site.install_backend("needy", "requires = ('no-such-engine-xyz>=1',)")
    file = home / "c.yaml"
    file.write_text("backend: needy\n")
    warning = f"Warning: {file}:1:10: backend 'needy' (needy-dist 1.0) can't be used: its engine doesn't fit"
    check = invoke("config", "check", str(file))
    assert (check.exit_code, check.stderr.startswith(warning)) == (0, True)
    assert check.stdout == f"{file}: no problem found; it can't run on this machine, where an engine is missing\n"
    show = invoke("config", "show", "--json", "--config", str(file))
    assert (show.exit_code, show.stderr.startswith(warning)) == (0, True)
    (message,) = json.loads(show.stdout)["engines_missing"]
    assert "pip install 'no-such-engine-xyz>=1'" in message


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "backend: single\nnum_processes: 2\n",
            "num_processes=2 ({file}:2), but backend 'single' ({file}:1) works with",
        ),
        ("num_machines: 2\nnum_processes: 3\n", "num_processes=3 ({file}:2) is the total over all machines"),
        ("num_machines: 2\nmax_restarts: 1\n", "max_restarts=1 ({file}:2) over several machines needs a rendezvous"),
        ("rdzv_conf: timeout\n", "rdzv_conf: 'timeout' is no key=value pair"),
    ],
)
def test_check_and_show_find_settings_that_no_launch_could_follow(home: Path, text: str, said: str) -> None:
    file = home / "c.yaml"
    file.write_text(text)
    for arguments in (["check", str(file)], ["show", "--config", str(file)]):
        result = invoke("config", *arguments)
        assert result.exit_code == 2
        assert f"Error: {said.format(file=file)}" in result.stderr


def test_check_passes_a_file_to_which_each_machine_adds_its_own(home: Path) -> None:
    file = home / "c.yaml"
    file.write_text("num_machines: 2\nnum_processes: 4\n")
    assert invoke("config", "check", str(file)).exit_code == 0


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


def test_default_writes_what_was_chosen(home: Path, open_site: Any) -> None:
    module = "import attrs\nfrom typing import Any\nfrom drivetrain.plugin import *\n@attrs.frozen\nclass C:\n"
    module += "    word: str = ''\n    list: Any = None\nclass Plug(Backend):\n    api = (1, 0)\n    Config = C\n"
    open_site.install_backend("wide", module=module)
    file = home / "deep" / "c.yaml"
    arguments = ["--num-processes", "2", "--mixed_precision", "no", "--no_check_collectives", "--log_dir", "2024"]
    arguments += [
        "--set",
        "compile.mode=default",
        "--set",
        "wide.word=no",
        "--set",
        "wide.list=[off, 'x: y', 1e-5]",
    ]
    assert invoke("config", "default", "--config_file", str(file), *arguments).exit_code == 0
    resolved = resolve(file, environment={})
    run = resolved.run
    assert (run.num_processes, run.mixed_precision, run.check_collectives, run.log_dir) == (2, "no", False, "2024")
    assert run.compile is not None
    assert run.compile.mode == "default"
    shown = {row.key: row.text for row in resolved.rows()}
    assert (shown["wide.word"], shown["wide.list"]) == ("no", "[off, x: y, 1.0e-05]")


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
    assert "num_processes: expected a whole number, got the text 'four'" in result.stderr
    result = invoke("config", "default", "--num_processes", "four")
    assert "command line: num_processes: expected a whole number, got the text 'four'" in result.stderr
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "snigle"], "no backend 'snigle'; did you mean 'single'?"),
        (["--set", "fp16.init_scale=big"], "fp16.init_scale: expected a number"),
        (["--backend", "single", "--num_processes", "2"], "backend 'single' (command line) works with one process"),
        (["--num_machines", "2", "--num_processes", "3"], "use 2 or 4"),
    ],
)
def test_default_writes_no_file_that_check_would_refuse(home: Path, arguments: list[str], said: str) -> None:
    result = invoke("config", "default", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert list(home.iterdir()) == []


def test_a_file_that_is_replaced_keeps_its_link_and_who_may_read_it(home: Path) -> None:
    target, link = home / "dotfiles.yaml", home / "default_config.yaml"
    target.write_text("num_processes: 7\n")
    target.chmod(0o600)
    link.symlink_to(target)
    assert invoke("config", "--help").exit_code == 0
    assert invoke("config", "default", "--num_processes", "2", "--overwrite").exit_code == 0
    assert link.is_symlink()
    assert resolve(target, environment={}).run.num_processes == 2
    assert target.stat().st_mode & 0o777 == 0o600


def test_who_may_read_a_new_file_is_decided_by_the_umask(home: Path) -> None:
    before = os.umask(0o077)
    try:
        invoke("config")
    finally:
        os.umask(before)
    assert (home / "default_config.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arguments", [["config"], ["config", "default"]])
def test_without_a_home_folder_nothing_is_written_into_the_current_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for name in ("DRIVETRAIN_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", os.fspath)  # as for a user that the system does not know
    monkeypatch.chdir(home)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "there is no home folder (HOME is not set); name a file, or set DRIVETRAIN_HOME" in result.stderr
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


def test_plugins_tell_of_their_engines_without_importing_them(open_site: Any) -> None:
    open_site.install_backend("needy", "requires = ('no-such-engine-xyz>=1',)")
    open_site.install_backend("fed", "requires = ('attrs>=20',)")
    open_site.install_backend("stale", requires=("attrs>=9999",))
    open_site.install_backend("secret", "requires = tuple(['attrs'])")
    open_site.install_backend("broken", module="raise OSError('no library')")
    for verbose in ([], ["--verbose"]):
        rows = {row["name"]: row for row in json.loads(invoke("plugins", "--json", *verbose).stdout)}
        assert rows["single"]["requires"] == rows["single"]["unmet"] == []
        assert rows["needy"]["unmet"] == ["needs no-such-engine-xyz>=1, which is not installed"]
        assert (rows["fed"]["requires"], rows["fed"]["unmet"]) == (["attrs>=20"], [])
        assert rows["stale"]["unmet"][0].startswith("needs attrs>=9999, but ")
        assert rows["secret"]["requires"] == (["attrs"] if verbose else None)
    table = " ".join(invoke("plugins").stdout.split())
    assert "engine: needs no-such-engine-xyz>=1, which is not installed" in table
    assert f"engine: attrs {importlib.metadata.version('attrs')}" in table
    assert "engine: not known; --verbose asks the plugin" in table
    assert "BROKEN: backend 'broken'" in " ".join(invoke("plugins", "--verbose").stdout.split())


def test_plugins_are_paragraphs_where_a_table_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    told = invoke("plugins").stdout
    for row in json.loads(invoke("plugins", "--json").stdout):
        assert f"{row['role']} {row['name']} {row['distribution']} {row['version']}\n  {row['description']}\n" in told


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
    monkeypatch.setenv("DRIVETRAIN_JSONL", "{key: secret}")
    monkeypatch.setenv("DRIVETRAIN_LOG_LEVEL", "info")
    result = invoke("env", "--json", "--set", "num_processes=2")
    facts = json.loads(result.stdout)
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["num_processes"] == "2 (command line)"
    assert facts["config file"] == "none"
    assert {"torch", "accelerator", "platform"} <= facts.keys()
    assert "secret" not in result.output
    assert (facts["DRIVETRAIN_LOG_LEVEL"], facts["DRIVETRAIN_JSONL"]) == ("info", "(set)")


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
