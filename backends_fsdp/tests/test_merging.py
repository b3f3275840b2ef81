"""Pieces of a checkpoint without their backend: they are made into model files, and loaded by core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from backends_fsdp.tests.recipes import WIDTH, net, settings, sgd, train_steps
from backends_fsdp.tests.test_training import Tied
from drivetrain.testing.pool import WorkerError


def save(directory: str, make: Any) -> None:
    """The state of a run, and what ``save_model`` writes of it."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = make()
    model, optimizer = accelerator.prepare(model, sgd(model))
    if make is net:
        train_steps(accelerator, model, optimizer, 2)
    accelerator.save_state(f"{directory}/state")
    accelerator.save_model(model, f"{directory}/right", max_shard_size=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ranks", "section", "make"),
    [
        ("fsdp", 2, {"transformer_classes": "Block"}, net),
        ("fsdp", 3, {}, Tied),
        ("fsdp", 4, {"replicate_size": 2, "ignored_modules": ["head"]}, net),
        ("fsdp1", 2, {}, Tied),
        ("fsdp1", 3, {"transformer_classes": "Block"}, net),
        ("fsdp1", 2, {"sharding_strategy": "no_shard"}, net),
    ],
)
def test_merged_pieces_are_the_files_of_save_model(
    worker_pool: Any, tmp_path: Path, backend: str, ranks: int, section: dict[str, Any], make: type[nn.Module]
) -> None:
    worker_pool(ranks).run(save, str(tmp_path), make, config=settings(backend, **section))
    # Neither a backend nor a process group: the files are all there is.
    script = (
        "import sys, torch.distributed as dist\n"
        "from drivetrain.cli import main\n"
        "main(['merge-weights', 'state', 'merged', '--max_shard_size', '300'], standalone_mode=False)\n"
        "sys.exit(any(name.startswith('drivetrain_') for name in sys.modules) or dist.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    merged, right = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("merged", "right")
    )
    assert len(right) > 1
    assert merged == right


def load_other(directory: str) -> None:
    """Another model than the saved one."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model.head = nn.Linear(WIDTH, 7)
    model, _ = accelerator.prepare(model, sgd(model))
    accelerator.load_state(f"{directory}/state")


def test_pieces_that_do_not_fit_are_refused_by_backends_that_do_not_shard(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(2).run(save, str(tmp_path), net, config=settings("fsdp"))
    message = r"head.weight is of shape \(3, 6\) there, and \(7, 6\) here.* Nothing was loaded"
    for backend, ranks in [("single", 1), ("ddp", 2)]:
        with pytest.raises(WorkerError, match=message) as caught:
            worker_pool(ranks).run(load_other, str(tmp_path), config={"backend": backend, "device": "cpu"})
        assert len(caught.value.errors) == ranks


@pytest.mark.slow
def test_a_checkpoint_knows_the_class_of_a_model_by_the_users_name(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(2).run(save, str(tmp_path), net, config=settings("fsdp"))
    manifest = json.loads((tmp_path / "state/manifest.json").read_text())
    assert [model["kind"] for model in manifest["models"]] == [type(net()).__name__]
    with pytest.raises(WorkerError, match=rf"do not fit model 0 \({type(net()).__name__}\)"):
        worker_pool(2).run(load_other, str(tmp_path), config=settings("fsdp"))
