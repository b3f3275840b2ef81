"""Every example runs as it stands, in one process and in two."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

TINY_TEXT = ["--characters", "6000", "--epochs", "1", "--context", "16", "--width", "16", "--layers", "1"]
TINY_DIGITS = ["--epochs", "1", "--width", "4", "--batch_size", "64"]

# Script, its arguments (PROJECT stands for a folder of the test's own), what it says on the main process.
RUNS = [
    ("digits/train.py", TINY_DIGITS, "weights equal on all of them: True"),
    ("text/train.py", [*TINY_TEXT, "--project_dir", "PROJECT"], "epoch 1: "),
    ("by_feature/accumulation.py", [], "4 x 8 and 1 x 32 differ by"),
    ("by_feature/batch_size_finder.py", [], "tried [128, 64, 32, 16]"),
    ("by_feature/checkpointing.py", ["--project_dir", "PROJECT"], "loss of the last batch"),
    ("by_feature/distributed_inference.py", [], "three has 5 letters"),
    ("by_feature/early_stopping.py", [], "stopped after"),
    ("by_feature/ema.py", ["--project_dir", "PROJECT"], "distance from the truth"),
    ("by_feature/local_sgd.py", [], "weights of all processes"),
    ("by_feature/metrics.py", [], "gather_for_metrics: 17"),
    ("by_feature/several_models.py", [], "'generator': 24, 'critic': 24"),
    ("by_feature/token_weighting.py", [], "tokens at once"),
    ("by_feature/tracking.py", ["--project_dir", "PROJECT"], "logged with jsonl"),
    ("by_feature/uneven_inputs.py", [], "samples on each process"),
]


def run_script(script: str, arguments: list[str]) -> str:
    """Run a script as Python would; returns what it printed."""
    printed = io.StringIO()
    before = sys.argv
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def run(pool: Any, ranks: int, script: str, arguments: list[str], project: Path) -> list[str]:
    given = [str(project) if argument == "PROJECT" else argument for argument in arguments]
    printed: list[str] = pool(ranks).run(
        run_script, str(EXAMPLES / script), given, config={"device": "cpu"}, timeout=60
    )
    return printed


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("script", "arguments", "says"), RUNS, ids=[script for script, _, _ in RUNS])
def test_example_runs(
    worker_pool: Any, tmp_path: Path, ranks: int, script: str, arguments: list[str], says: str
) -> None:
    first, *others = run(worker_pool, ranks, script, arguments, tmp_path)
    assert says in first
    assert not any(says in other for other in others), "only the main process speaks"


def test_every_example_is_run() -> None:
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    assert scripts == {script for script, _, _ in RUNS}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_checkpointing_example_ends_the_same_with_and_without_a_break(
    worker_pool: Any, tmp_path: Path, ranks: int
) -> None:
    script = "by_feature/checkpointing.py"
    whole, *_ = run(worker_pool, ranks, script, ["--project_dir", "PROJECT"], tmp_path / "whole")
    run(worker_pool, ranks, script, ["--project_dir", "PROJECT", "--stop_after", "11"], tmp_path / "broken")
    resumed, *_ = run(worker_pool, ranks, script, ["--project_dir", "PROJECT", "--resume"], tmp_path / "broken")
    assert "going on in epoch 1 after 11 batches" in resumed
    assert whole.splitlines()[-1] == resumed.splitlines()[-1]


def test_the_text_example_goes_on_from_its_checkpoint(worker_pool: Any, tmp_path: Path) -> None:
    arguments = [*TINY_TEXT, "--project_dir", "PROJECT"]
    run(worker_pool, 1, "text/train.py", arguments, tmp_path)
    more = [*arguments, "--epochs", "2", "--resume"]
    (printed,) = run(worker_pool, 1, "text/train.py", more, tmp_path)
    assert "epoch 1:" not in printed
    assert "epoch 2:" in printed
    assert (tmp_path / "model" / "model.safetensors").exists()
