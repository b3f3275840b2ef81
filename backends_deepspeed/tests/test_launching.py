"""Launched scripts: mistakes of the engine's file end before any process starts, and jobs leave each other alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.requirements import installed_version

SCRIPT = """
import torch
from torch.nn.functional import mse_loss
from drivetrain import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
torch.manual_seed(accelerator.process_index)
for _ in range(3):
    loss = mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 8))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("trained with", accelerator.num_processes, "as", accelerator.distributed_type)
accelerator.end_training()
"""


def start(folder: Path, *arguments: str, **section: Any) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    run = {"backend": "deepspeed", "device": "cpu", "num_processes": 2, "deepspeed": section}
    (folder / "run.json").write_text(json.dumps(run))
    command = [sys.executable, "-m", "drivetrain", "launch", "--config_file", "run.json", *arguments, "train.py"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"bf16": {"enabled": True}}, "bf16.enabled is true in config_file, and mixed_precision is no (default)"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "2 samples x 2 micro-batches x 2 processes are 8",
        ),
        ({"zero_optimization": {"stage": 9}}, "must be 0, 1, 2 or 3, got 9"),
    ],
)
@pytest.mark.skipif(installed_version("deepspeed") is None, reason="the engine is not installed")
def test_a_wrong_file_is_an_error_before_any_process_starts(tmp_path: Path, file: dict[str, Any], message: str) -> None:
    output, _ = (process := start(tmp_path, config_file=file)).communicate(timeout=60)
    assert process.returncode != 0
    assert message in output.replace("\n", " ")
    assert "rank" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(installed_version("deepspeed") is None, reason="the engine is not installed")
def test_two_jobs_train_side_by_side_and_leave_no_file(tmp_path: Path) -> None:
    jobs = [start(tmp_path / str(stage), zero_stage=stage) for stage in (2, 3)]
    for stage, job in zip((2, 3), jobs, strict=True):
        output, _ = job.communicate(timeout=200)
        assert job.returncode == 0, output
        assert "trained with 2 as DEEPSPEED" in output
        assert sorted(path.name for path in (tmp_path / str(stage)).iterdir()) == ["run.json", "train.py"]
