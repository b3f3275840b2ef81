"""Numbers that the benchmarks print must be right, and every benchmark must at least start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1]
SCRIPTS = ["checkpoint", "import_time", "loader_rate", "step_overhead", "transformer_step"]


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import measuring

    return measuring


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_summary_is_the_median_with_its_quartiles(measuring):
    summary = measuring.Summary.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (summary.low, summary.median, summary.high) == (2.0, 3.0, 4.0)


def test_one_slow_block_does_not_move_the_median(measuring):
    assert measuring.Summary.of([1.0, 1.0, 1.0, 1.0, 900.0]).median == 1.0


def test_single_measurement_has_no_spread(measuring):
    assert measuring.Summary.of([7.0]).text(digits=1) == "7.0 [7.0, 7.0]"


def test_table_lines_are_equally_long(measuring):
    lines = measuring.table(["name", "us"], [["a", "1"], ["much longer", "1234"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("-:|")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_explains_itself(script):
    assert f"benchmarks/{script}.py" in run(script, "--help")


@pytest.mark.slow
def test_step_overhead_compares_with_the_hand_written_loop():
    printed = run(
        "step_overhead",
        *("--ranks", "2", "--accumulation", "2", "--precision", "no", "--steps", "4", "--blocks", "2"),
        *("--contenders", "torch", "drivetrain", "--no_results"),
    )
    assert "ranks 2, accumulation 2, precision no" in printed
    assert "| drivetrain |" in printed


@pytest.mark.slow
def test_a_step_adds_few_function_calls(measuring):
    # Time can't be tested on a shared machine, but what the interpreter has to do can. The peers add 90 and 870.
    from conductor import measure

    options = {"model": "tiny", "steps": 40, "accumulation": 4, "ranks": 1}
    measured = measure("training:build", ["drivetrain"], options, ranks=1, blocks=1)
    assert measured["drivetrain"].added_calls / 40 < 45


@pytest.mark.slow
def test_promises_of_fp8_are_examined_without_a_gpu_too():
    size = ("--width", "32", "--rows", "16", "--layers", "1", "--steps", "4")
    output = run("gpu_fp8", "--cpu", "--only", "tensorwise", "--no_results", *size)
    assert "| torchao tensorwise |" in output
    assert "BROKEN" not in output
