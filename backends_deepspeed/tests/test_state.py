"""Checkpoints and weights: loaded in another world, at another stage, by name, and what goes on after that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends_deepspeed.tests.recipes import close, full, grouped, loss_of, net, settings
from drivetrain.testing.pool import WorkerPool

STAGES = [0, 1, 2, 3]
LIMIT = 60.0


def run_on(folder: str, action: str, updates: int, first: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Train on what all ranks share, so that their number makes no difference; save after it, or load before."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net(seed=0 if action == "save" else 7)
    optimizer = grouped(model)
    if action == "load":
        for group in optimizer.param_groups:
            group["lr"] = 9.0  # what was saved counts
    model, optimizer = accelerator.prepare(model, optimizer)
    if action == "load":
        accelerator.load_state(folder)
    losses = []
    for number in range(first, first + updates):
        loss = loss_of(model, number)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if action == "save":
        accelerator.save_state(folder)
    return losses, full(accelerator, model)


def unbroken(updates: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = net(), []
    optimizer = grouped(model)
    for number in range(updates):
        loss = loss_of(model, number)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_ranks_goes_on_as_if_nothing_had_happened(
    ranks: WorkerPool, tmp_path: Path, stage: int
) -> None:
    folder = str(tmp_path / "state")
    losses, weights = unbroken(5)
    ranks.run(run_on, folder, "save", 3, size=2, config=settings(stage), timeout=LIMIT)
    for size in (3, 1):
        everyone = ranks.run(run_on, folder, "load", 2, 3, size=size, config=settings(stage), timeout=LIMIT)
        for found, _ in everyone:
            assert found == pytest.approx(losses[3:], rel=1e-5)
        close(everyone[0][1], weights, 2e-6)


def test_every_stage_goes_on_from_every_other(ranks: WorkerPool, tmp_path: Path) -> None:
    losses, _ = unbroken(5)
    for saved in STAGES:
        folder = str(tmp_path / f"stage-{saved}")
        ranks.run(run_on, folder, "save", 3, size=2, config=settings(saved), timeout=LIMIT)
        loaded = (saved + 1) % 4
        found, _ = ranks.run(run_on, folder, "load", 2, 3, size=2, config=settings(loaded), timeout=LIMIT)[0]
        assert found == pytest.approx(losses[3:], rel=1e-5), f"from stage {saved} at stage {loaded}"


@pytest.mark.parametrize(("backend", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_backends_go_on_from_what_was_saved(
    ranks: WorkerPool, tmp_path: Path, stage: int, backend: str, size: int
) -> None:
    losses, weights = unbroken(5)
    folder = str(tmp_path / "state")
    ranks.run(run_on, folder, "save", 3, size=2, config=settings(stage), timeout=LIMIT)
    config = {"backend": backend, "device": "cpu"}
    found, loaded = ranks.run(run_on, folder, "load", 2, 3, size=size, config=config, timeout=LIMIT)[0]
    assert found == pytest.approx(losses[3:], rel=1e-5)
    close(loaded, weights, 2e-6)


def test_a_rank_that_has_been_at_stage_3_trains_like_one_that_has_not(ranks: WorkerPool, tmp_path: Path) -> None:
    """The engine replaces a function of torch there, which changes the order in which gradients come."""
    losses, _ = unbroken(3)
    ranks.run(run_on, str(tmp_path / "three"), "save", 1, size=2, config=settings(3), timeout=LIMIT)
    for found, _ in ranks.run(run_on, str(tmp_path / "two"), "save", 3, size=3, config=settings(2), timeout=LIMIT):
        assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_precision_keeps_the_master_weights(ranks: WorkerPool, tmp_path: Path, stage: int) -> None:
    folder = str(tmp_path / "state")
    _, before = ranks.run(run_on, folder, "save", 3, size=2, config=settings(stage, "bf16"), timeout=LIMIT)[0]
    _, after = ranks.run(run_on, folder, "load", 0, size=2, config=settings(stage, "bf16"), timeout=LIMIT)[0]
    close(after, before, 0.0)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in after.values())


def test_no_file_of_a_checkpoint_is_pickled_and_none_is_left_elsewhere(ranks: WorkerPool, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    here = os.getcwd()
    os.chdir(work)
    try:
        ranks.run(run_on, str(tmp_path / "state"), "save", 1, size=2, config=settings(3), timeout=LIMIT)
    finally:
        os.chdir(here)
    assert list(work.iterdir()) == []
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} == {".json", ".safetensors"}


# --------------------------------------------------------------------------------------------------------- weights


def saved(folder: str) -> Any:
    from safetensors.torch import load_file

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, grouped(model))
    accelerator.backward(loss_of(model, 0))
    optimizer.step()
    root = Path(folder)
    accelerator.save_model(model, root / "whole")
    accelerator.save_model(accelerator.unwrap_model(model), root / "unwrapped")
    accelerator.wait_for_everyone()
    files = [(root / name / "model.safetensors").read_bytes() for name in ("whole", "unwrapped")]
    return files[0] == files[1], load_file(root / "whole" / "model.safetensors")


@pytest.mark.parametrize("stage", STAGES)
def test_save_model_writes_the_same_bytes_for_the_model_and_the_module_in_it(
    ranks: WorkerPool, tmp_path: Path, stage: int
) -> None:
    _, weights = unbroken(1)
    same, found = ranks.run(saved, str(tmp_path), size=2, config=settings(stage), timeout=LIMIT)[0]
    assert same
    weights.pop("again.weight")  # tied: written once
    close({name.replace("again", "tied"): value for name, value in found.items()}, weights)


def warm() -> tuple[list[float], Any]:
    """An optimizer that has worked before it is prepared."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = net()
    optimizer = grouped(model)
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for number in (3, 4):
        loss = loss_of(model, number)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    hooks, inner = accelerator.run.hooks, optimizer.optimizer
    whole = hooks.optimizer_state(run=accelerator.run, optimizer=inner, models=[model])
    return losses, {
        number: {key: tuple(value.shape) for key, value in entries.items()}
        for number, entries in whole["state"].items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_brings_its_state_along(ranks: WorkerPool, stage: int) -> None:
    losses, _ = unbroken(5)
    everyone = ranks.run(warm, size=2, config=settings(stage), timeout=LIMIT)
    for found, _ in everyone:
        assert found == pytest.approx(losses[3:], rel=1e-5)
    right = grouped(net())
    shapes = [tuple(p.shape) for group in right.param_groups for p in group["params"]]
    state = everyone[0][1]
    assert {number: entries["exp_avg"] for number, entries in state.items()} == dict(enumerate(shapes))
