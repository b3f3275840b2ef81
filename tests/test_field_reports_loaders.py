"""Right values for reported faults in loaders that batch in unusual ways, where no other test has them.

Everything that needs ranks runs on real ones, in tasks that take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from drivetrain import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from tests.one_weight import OneWeight
from tests.streams import Numbers


class ReadyBatches(IterableDataset[Tensor]):
    """A stream of batches of three rows, each of which holds the batch's number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((3, 2), number) for number in range(self.count))


class Joined(Dataset[Tensor]):
    """Reads several samples at once, from a list of their indices."""

    def __getitem__(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices)


# --------------------------------------------------------------------------------------------------- ready-made batches


def share_ready_batches(stream: bool, dispatch: bool | None) -> list[tuple[int, list[int], list[int], int | None]]:
    """For several lengths: batches this rank got, rows that a metric got, and the length the loader said."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    seen = []
    for count in (1, 3, 4, 5):
        data: Any = ReadyBatches(count) if stream else list(ReadyBatches(count))
        loader = accelerator.prepare(DataLoader(data, batch_size=None))
        mine, metric = [], []
        for batch in loader:
            assert batch.shape == (3, 2)
            mine.append(int(batch[0, 0]))
            metric += accelerator.gather_for_metrics(batch)[:, 0].tolist()
        seen.append((count, mine, metric, None if stream else len(loader)))
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dispatch", [None, True, False])
def test_ready_made_batches_go_round_whole_and_count_once(
    worker_pool: Any, ranks: int, stream: bool, dispatch: bool | None
) -> None:
    for rank, seen in enumerate(worker_pool(ranks).run(share_ready_batches, stream, dispatch)):
        for count, mine, metric, length in seen:
            own = list(range(rank, count, ranks))
            assert mine[: len(own)] == own
            assert len(mine) == -(-count // ranks)
            assert metric == [number for number in range(count) for _ in range(3)]
            assert length in (None, len(mine))


def share_joined_samples(dispatch: bool | None, shuffle: bool, drop_last: bool) -> tuple[list[int], int, int]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    samples = RandomSampler(range(22)) if shuffle else SequentialSampler(range(22))
    loader = DataLoader(Joined(), sampler=BatchSampler(samples, 4, drop_last), batch_size=None)
    loader = accelerator.prepare(loader)
    batches = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    return [index for batch in batches for index in batch], len(batches), len(loader)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_in_the_place_of_a_sampler_is_shared_out_by_batches(
    worker_pool: Any, ranks: int, dispatch: bool | None, shuffle: bool, drop_last: bool
) -> None:
    for metric, batches, length in worker_pool(ranks).run(share_joined_samples, dispatch, shuffle, drop_last):
        assert length == batches
        whole = 20 - 20 % (4 * ranks) if drop_last else 22
        assert len(set(metric)) == len(metric) == whole
        assert shuffle or metric == list(range(whole))


# -------------------------------------------------------------------------------------------------- sizes and positions


def count_what_is_collated(split: bool, dispatch: bool | None) -> tuple[list[int], set[int]]:
    collated = set()

    def collate(samples: list[int]) -> Tensor:
        collated.add(len(samples))
        return torch.tensor(samples)

    configuration = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
    loader = DataLoader(Numbers(64), batch_size=16, collate_fn=collate)
    loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)
    return [len(batch) for batch in loader], collated


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dispatch", [None, False])
def test_the_batches_of_a_stream_are_divided_once_whoever_reads_them(
    worker_pool: Any, split: bool, dispatch: bool | None
) -> None:
    sizes = [8] * 4 if split else [16] * 2
    reads = [{16}, {16} if dispatch is False else set()]
    assert worker_pool(2).run(count_what_is_collated, split, dispatch) == [(sizes, collated) for collated in reads]


def skip_one() -> tuple[list[list[int]], int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(14 * accelerator.num_processes), batch_size=5, drop_last=True))
    skipped = accelerator.skip_first_batches(loader, 1)
    return [sorted(accelerator.gather_for_metrics(batch).tolist()) for batch in skipped], len(loader)


def test_metrics_after_skipping_keep_the_whole_last_batch_where_the_tail_was_dropped(worker_pool: Any) -> None:
    assert worker_pool(1).run(skip_one) == [([list(range(5, 10))], 2)]
    assert worker_pool(2).run(skip_one) == [([list(range(10, 20))], 2)] * 2


def update_within_batches() -> list[float]:
    """Batches of four samples, each a micro-batch of its own, in groups of four."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = OneWeight(0.0)
    loader = DataLoader([1.0] * 8 * accelerator.num_processes, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, SGD(model.parameters(), lr=1.0), loader)
    seen = []
    for batch in loader:
        for x in batch.split(1):
            with accelerator.accumulate(model):
                accelerator.backward(model(x))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(accelerator.unwrap_model(model).w.item())
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_a_batch_form_groups_where_the_loaders_end_does_not_count(worker_pool: Any, ranks: int) -> None:
    assert worker_pool(ranks).run(update_within_batches) == [[0.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -2.0]] * ranks
