"""What can't be is a clear error, the same on all ranks, before anything hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends_fsdp.tests.recipes import BOTH, settings
from drivetrain.testing.pool import WorkerError


def prepare(case: str) -> None:
    import os

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if case == "stranger":
        accelerator.prepare(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1))
    elif case == "different":
        accelerator.prepare(nn.Linear(2, 2 + int(os.environ["RANK"])))
    elif case == "shared":
        other = nn.Linear(4, 4)
        other.weight = model[0].weight
        accelerator.prepare(model, other)
    elif case == "shared later":
        other = nn.Linear(4, 4)
        other.weight = model[0].weight
        accelerator.prepare(model)
        accelerator.prepare(nn.Sequential(other))
    elif case == "sharded":
        wrapped = accelerator.prepare(model)
        accelerator.prepare(nn.Sequential(wrapped, nn.Linear(4, 4)))
    elif case == "meta":
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        accelerator.prepare(model)
    elif case == "meta on one":
        with torch.device("meta" if accelerator.process_index == 1 else "cpu"):
            model = nn.Linear(4, 4)
        accelerator.prepare(model)
    else:
        accelerator.prepare(model)


@pytest.mark.parametrize(
    ("case", "section", "message"),
    [
        ("", {"transformer_classes": "Foo"}, "no module of class Foo. It has: Linear, ReLU, Sequential"),
        ("", {"ignored_modules": "layer.*"}, "matches no module of Sequential"),
        ("", {"wrap_policy": "size", "min_num_params": 1000}, "no module of at least 1000 parameters"),
        ("", {"replicate_size": 2, "shard_size": 2}, "must be their number, and is 2 x 2 = 4"),
        ("", {"shard_size": 3}, "can't be had with 2 processes"),
        ("stranger", {}, r"SGD holds 1 parameter\(s\) of no prepared model"),
        ("different", {}, "not the same model on all ranks"),
        ("shared", {}, "Linear shares the parameter 'weight' with Sequential"),
        ("shared later", {}, "Sequential shares the parameter '0.weight' with Sequential"),
        ("sharded", {}, "is sharded already"),
        ("meta", {}, "no values for 'weight' on rank 0"),
        ("meta on one", {"sync_module_states": False}, "no values for 'weight' on rank 1.*sync_module_states: true"),
    ],
)
@BOTH
def test_bad_input_is_the_same_error_on_all_ranks(
    worker_pool: Any, backend: str, case: str, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        worker_pool(2).run(prepare, case, config=settings(backend, **section))
    assert len(caught.value.errors) == 2
    assert len({error.message for error in caught.value.errors}) == 1


@pytest.mark.parametrize(
    ("backend", "precision", "section", "message"),
    [
        ("fsdp", "no", {"reshard_after_forward": 3}, "reshard_after_forward: 3 does not divide the 2 ranks"),
        ("fsdp", "no", {"mixed_precision_policy": {"param_dtype": "float16"}}, "float16 needs loss scaling"),
        ("fsdp", "fp16", {"mixed_precision_policy": {"param_dtype": "bfloat16"}}, r"fp16 \(float16\) contradict"),
        ("fsdp1", "bf16", {"mixed_precision_policy": {"param_dtype": "float16"}}, r"bf16 \(bfloat16\) contradict"),
        ("fsdp1", "no", {"cpu_offload": True}, "in host memory already on a CPU"),
        ("fsdp1", "no", {"sharding_strategy": "hybrid_shard"}, "set fsdp1.replicate_size"),
        ("fsdp1", "no", {"replicate_size": 2}, "fsdp1.replicate_size=2 leaves each of 2 processes a whole model"),
    ],
)
def test_settings_the_run_cannot_have_are_refused(
    worker_pool: Any, backend: str, precision: str, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        worker_pool(2).run(prepare, "", config=settings(backend, precision, **section))
    assert len(caught.value.errors) == 2


@BOTH
@pytest.mark.slow
def test_one_process_asked_for_in_code_is_an_error_and_in_a_file_a_note(tmp_path: Path, backend: str) -> None:
    (tmp_path / "train.yaml").write_text(f"backend: {backend}\ndevice: cpu\n")
    script = (
        "from drivetrain import Accelerator, FullyShardedDataParallelPlugin as Plugin\n"
        "import sys, torch\n"
        f"plugin = Plugin(fsdp_version={1 if backend == 'fsdp1' else 2}) if sys.argv[1] == 'code' else None\n"
        "accelerator = Accelerator(fsdp_plugin=plugin, config_file='train.yaml')\n"
        "print(accelerator.run.names['backend'], type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__)\n"
    )
    (tmp_path / "train.py").write_text(script)

    def run(where: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train.py", where]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    asked = run("code")
    assert asked.returncode != 0
    assert f"backend '{backend}' was asked for in code, but this is a single process" in asked.stderr
    alone = run("file")
    assert alone.stdout == "single Linear\n"
    assert alone.stderr.count(f"one process: running without backend '{backend}' (train.yaml:1") == 1


def join() -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    with accelerator.run.hooks.join(run=accelerator.run, models=[model]):
        pass


@BOTH
def test_uneven_inputs_are_refused(worker_pool: Any, backend: str) -> None:
    with pytest.raises(WorkerError, match="leave even_batches on"):
        worker_pool(2).run(join, config=settings(backend))


def hot() -> None:
    from drivetrain import Accelerator, defaults
    from drivetrain_fsdp import backend as module

    accelerator = Accelerator()
    hooks = accelerator.run.hooks
    cls = module.Fsdp if accelerator.run.names["backend"] == "fsdp" else module.Fsdp1
    own = {"accumulate", "clip_grad_norm", "clip_grad_value", "zero_grad" if cls is module.Fsdp else "backward"}
    for name in own:
        assert hooks.bind(name).__func__ is getattr(cls, name)
    for name in {"backward", "step", "zero_grad", "place", "autocast", "scale_gradients"} - own:
        assert hooks.bind(name) is getattr(defaults, name)


@BOTH
def test_the_hot_path_is_the_plugins_own_functions_or_cores(worker_pool: Any, backend: str) -> None:
    worker_pool(2).run(hot, config=settings(backend))
