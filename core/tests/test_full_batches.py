"""Metrics of a short last batch: what is one entry a sample, though a script made it as long as a full batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_run")

BATCH = 8
SIZES = [5, 8, 9, 10, 12, 19, 21, 24]
"""Last batches of 5, 8, 1, 2, 4, 3, 5 and 8 samples."""


def gathered(samples: int, make: Any, **options: Any) -> list[Any]:
    """What is gathered for each batch of so many samples."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(float(samples)), batch_size=BATCH))
    return [accelerator.gather_for_metrics(make(batch), **options) for batch in loader]


@pytest.mark.parametrize("samples", SIZES)
def test_a_loss_repeated_for_a_full_batch_counts_once_a_sample(samples: int) -> None:
    losses = torch.cat(gathered(samples, lambda batch: batch.mean().repeat(BATCH)))
    assert len(losses) == samples
    assert losses.mean().item() == pytest.approx((samples - 1) / 2)


@pytest.mark.parametrize("samples", SIZES)
def test_several_entries_a_sample_are_all_kept(samples: int) -> None:
    twice = torch.cat(gathered(samples, lambda batch: batch.repeat_interleave(2)))
    assert twice.tolist() == torch.arange(float(samples)).repeat_interleave(2).tolist()


def test_a_short_batch_that_is_the_only_one_keeps_what_may_be_several_entries_a_sample() -> None:
    (only,) = gathered(4, lambda batch: batch.repeat_interleave(2))
    assert len(only) == 8


@pytest.mark.parametrize("samples", [9, 12, 19])
def test_lists_and_arrays_are_taken_like_tensors_and_other_lengths_stay(samples: int) -> None:
    def make(batch: torch.Tensor) -> Any:
        return {"texts": ["x"] * BATCH, "array": batch.mean().repeat(BATCH).numpy(), "classes": torch.ones(3)}

    found = gathered(samples, make)
    assert sum(len(each["texts"]) for each in found) == samples
    assert sum(len(each["array"]) for each in found) == samples
    assert {len(each["classes"]) for each in found} == {3}


@pytest.mark.parametrize("samples", [9, 12, 19])
def test_objects_repeated_for_a_full_batch_count_once_a_sample(samples: int) -> None:
    found = gathered(samples, lambda batch: [{"first": batch[0].item()}] * BATCH, use_gather_object=True)
    assert sum(map(len, found)) == samples
