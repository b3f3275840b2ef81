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
