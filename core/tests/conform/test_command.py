"""``drivetrain conform``, and the same under pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from drivetrain.cli import main
from drivetrain.testing.conformance.checks import all_checks

# -------------------------------------------------------------------------------------------------------- the command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["conform", *arguments], prog_name="drivetrain")


def test_the_command_ends_with_0_and_a_table_if_all_is_well() -> None:
    result = invoke("--backend", "single", "-k", "the API version")
    assert result.exit_code == 0, result.output
    assert "backend single: passed 1, skipped 0 (not claimed), known 0, failed 0" in result.output


def test_the_command_says_what_took_long() -> None:
    result = invoke("--backend", "single", "-k", "the API version", "--durations", "3")
    assert result.exit_code == 0, result.output
    assert re.search(r"^ +\d+\.\d s  static: the API version is a literal in the class body$", result.output, re.M)


def test_the_command_ends_with_1_and_the_reason_if_a_check_fails(workers: Any) -> None:
    result = invoke("--backend", "ComputedApi", "-k", "the API version", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["failed"], found["counts"]) == (True, {"static": {"failed": 1}})
    assert "write a literal" in found["outcomes"][0]["detail"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name what to examine"),
        (("--backend", "singel"), "did you mean 'single'"),
        (("--backend", "single", "-k", "brews coffee"), "no check has 'brews coffee'"),
        (("--backend", "single", "--size", "2"), "works with one process only"),
        (("--backend", "single", "--size", "0"), "x>=1"),
        (("--backend", "single", "--set", "nonsense"), "is no KEY=VALUE"),
        (("--backend", "single", "--set", "single=[1"), "command line: single: '[1' is not valid"),
        (("--backend", "single", "--set", "single=1", "--set", "single.x=1"), "single.x: unknown key"),
        (("--backend", "single", "--set", "fp16.init_scale=1", "--set", "fp16.init_scale=2"), "is given twice"),
    ],
)
def test_the_command_ends_with_2_if_it_is_used_wrongly(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_the_command_lists_checks_without_running_any() -> None:
    result = invoke("--list", "-k", "cost:")
    assert (result.exit_code, result.output) == (0, "cost: hot hooks are bound to the plugin's own methods\n")


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom drivetrain.cli import main\n"
        "try: main(['conform', '--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


# -------------------------------------------------------------------------------------------------------------- pytest

SUITE = """
import pytest
from drivetrain.testing.suite import *


@pytest.fixture
def drivetrain_plugin():
    return Suite(backend="single", groups=("static",))
"""


@pytest.mark.slow
def test_one_fixture_and_one_import_make_a_test_of_each_check(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", "-k", "static or launch"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    static = sum(check.group == "static" for check in all_checks())
    launch = sum(check.group == "launch" for check in all_checks())
    assert f"{static} passed, {launch} skipped" in done.stdout, done.stdout
    assert "conformance: backend single" in done.stdout
    assert f"static        {static}" in done.stdout
