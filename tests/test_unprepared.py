"""What was not passed to ``prepare`` in a run of several ranks is missed aloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drivetrain.testing.logs import log_lines


def forgotten(model_too: bool) -> list[str]:
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    if not model_too:
        model = accelerator.prepare(model)
    with log_lines() as told:
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    return [text for text in told if "Pass both to accelerator.prepare" in text]


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("model_too", "words"), [(False, "no optimizer was prepared"), (True, "no model was prepared")]
)
def test_a_forgotten_optimizer_or_model_is_named_once_by_rank_0(
    worker_pool: Callable[[int], Any], backend: str, model_too: bool, words: str
) -> None:
    config = {"backend": backend, "device": "cpu"}
    first, second = worker_pool(2).run(forgotten, model_too, config=config)
    (told,) = first
    assert words in told
    assert second == []


def trained_by_another() -> list[str]:
    from torch.utils.data import DataLoader

    from drivetrain import Accelerator

    preparing, training = Accelerator(), Accelerator()
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = preparing.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(8, 2), batch_size=2)
    )
    with log_lines() as told:
        for batch in loader:
            training.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [text for text in told if "prepare" in text]


def test_what_another_accelerator_of_the_process_prepared_is_not_missed(worker_pool: Callable[[int], Any]) -> None:
    told = worker_pool(2).run(trained_by_another, config={"backend": "ddp", "device": "cpu"})
    assert told == [[], []]
