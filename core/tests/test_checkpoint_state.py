"""Going on as if nothing had happened: a whole run in one process, bit by bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, GradScalerKwargs, set_seed, state

pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")


# -------------------------------------------------------------------------------------------------- an unbroken run


class Trainer:
    """A run with everything that has a state. ``seed`` decides all that a checkpoint must bring back."""

    def __init__(self, seed: int, **options: Any) -> None:
        state.reset()
        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[FAST_SCALER], **options)
        data = torch.Generator().manual_seed(0)
        inputs = torch.randn(22, 4, generator=data)
        loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2, shuffle=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, steps: int, style: str, after: Callable[[int], None] = lambda step: None) -> list[Any]:
        """Go on to that many micro-batches in all; returns what can be seen of each."""
        seen = []
        while True:
            for inputs, targets in self.loader:
                if style == "block":
                    with self.accelerator.accumulate(self.model):
                        seen.append(self.micro_batch(inputs, targets, zero_first=True))
                else:
                    seen.append(self.micro_batch(inputs, targets, zero_first=style == "zero first"))
                after(self.accelerator.step)
                if self.accelerator.step == steps:
                    return seen

    def micro_batch(self, inputs: torch.Tensor, targets: torch.Tensor, zero_first: bool) -> Any:
        if zero_first:
            self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(inputs), targets)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        if not zero_first:
            self.optimizer.zero_grad()
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return (loss.item(), self.scheduler.get_last_lr(), self.model[0].weight.tolist(), draws)


@pytest.mark.parametrize("style", ["zero first", "zero last", "block"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_run_goes_on_bit_by_bit_from_a_checkpoint_after_any_micro_batch(
    tmp_path: Path, style: str, precision: str
) -> None:
    """Two and a half epochs of eleven batches in groups of four: inside groups, at their ends, after short ones."""
    options = {"gradient_accumulation_steps": 4, "mixed_precision": precision}
    trainer = Trainer(1, **options)
    whole = trainer.train(28, style, lambda step: trainer.accelerator.save_state(tmp_path / str(step)) and None)
    for step in (1, 3, 4, 6, 8, 10, 11, 12, 15, 20, 22, 23):
        resumed = Trainer(2, **options)
        resumed.accelerator.load_state(tmp_path / str(step))
        assert resumed.accelerator.step == step
        assert resumed.train(28, style) == whole[step:], f"after micro-batch {step}"


def test_a_skipped_update_is_still_known_to_be_one(tmp_path: Path) -> None:
    trainer = Trainer(1, mixed_precision="fp16")
    loss = trainer.model(torch.ones(2, 4)).sum() * float("inf")
    trainer.accelerator.backward(loss)
    trainer.optimizer.step()
    trainer.accelerator.save_state(tmp_path / "c")
    resumed = Trainer(2, mixed_precision="fp16")
    assert not resumed.accelerator.optimizer_step_was_skipped
    resumed.accelerator.load_state(tmp_path / "c")
    assert resumed.accelerator.optimizer_step_was_skipped
    assert resumed.accelerator.scaler.get_scale() == FAST_SCALE / 2


FAST_SCALE = 1024.0
FAST_SCALER = GradScalerKwargs(init_scale=FAST_SCALE, growth_factor=16.0, growth_interval=1)
"""A loss scale that grows at each update until it overflows."""


def test_saving_changes_nothing(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "mixed_precision": "fp16"}
    undisturbed = Trainer(1, **options).train(30, "block")
    trainer = Trainer(1, **options)
    assert (
        trainer.train(30, "block", lambda step: trainer.accelerator.save_state(tmp_path / "c") and None) == undisturbed
    )


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint_state import Trainer
trainer = Trainer(int(sys.argv[3]), gradient_accumulation_steps=4, mixed_precision="fp16")
if sys.argv[4] == "save":
    save = lambda step: step == 14 and trainer.accelerator.save_state(sys.argv[2])
    print(trainer.train(28, "block", save)[14:])
else:
    trainer.accelerator.load_state(sys.argv[2])
    print(trainer.train(28, "block"))
"""


@pytest.mark.slow
def test_a_fresh_process_goes_on_with_identical_losses(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path / "c"), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90, env=environment).stdout

    whole = run("1", "save")
    assert len(whole) > 1000
    assert run("2", "load") == whole


def test_after_two_of_four_micro_batches_the_next_update_comes_two_later(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, Any, Any]:
        state.reset()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = nn.Linear(1, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    accelerator, model, optimizer = make()
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(tmp_path / "c")
    accelerator, model, optimizer = make()
    accelerator.load_state(tmp_path / "c")
    assert accelerator.step == 6
    syncs = []
    for _ in range(6):
        with accelerator.accumulate(model):
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, False, False, False, True]


def test_a_copy_of_the_loader_that_skips_goes_on_with_the_group(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 4}
    trainer = Trainer(1, **options)
    whole = trainer.train(11, "zero first", lambda step: step == 6 and trainer.accelerator.save_state(tmp_path / "c"))
    resumed = Trainer(2, **options)
    resumed.accelerator.load_state(tmp_path / "c")
    resumed.loader = resumed.accelerator.skip_first_batches(resumed.loader, 6)
    assert resumed.train(11, "zero first") == whole[6:]


@pytest.mark.parametrize("style", ["zero first", "zero last", "block"])
def test_loading_into_a_run_that_has_trained_on_drops_what_it_accumulated(tmp_path: Path, style: str) -> None:
    trainer = Trainer(1, gradient_accumulation_steps=2)
    whole = trainer.train(14, style, lambda step: step == 6 and trainer.accelerator.save_state(tmp_path / "c"))
    trainer.train(16, style)
    assert any(parameter.grad is not None for parameter in trainer.model.parameters())
    trainer.accelerator.load_state(tmp_path / "c")
    assert trainer.train(14, style) == whole[6:]


def test_another_precision_can_be_chosen_for_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(1, mixed_precision="fp16").accelerator.save_state(tmp_path / "c")
    Trainer(1).accelerator.load_state(tmp_path / "c")
    assert "has a loss scale; this run ('no') goes on without" in caplog.text
    Trainer(1).accelerator.save_state(tmp_path / "c")
    Trainer(1, mixed_precision="fp16").accelerator.load_state(tmp_path / "c")
    assert "has no loss scale; this run ('fp16') goes on with its first one" in caplog.text
