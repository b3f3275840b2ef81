"""Prepared loaders over map-style data, each rank simulated in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from core.tests.loaders import epoch, metric, prepare


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_length_coverage_and_metrics_over_a_sweep(ranks: int, split: bool, drop_last: bool) -> None:
    for n in range(1, 14):
        for share in range(1, 5):
            size = share * ranks if split else share
            source = DataLoader(range(n), batch_size=size, drop_last=drop_last)
            loaders = [prepare(source, rank, ranks, split_batches=split) for rank in range(ranks)]
            lists = [epoch(loader) for loader in loaders]
            assert [len(loader) for loader in loaders] == [len(batches) for batches in lists]
            if ranks > 1:
                assert {len(batch) for batches in lists for batch in batches} <= {share}
            whole = n - n % (share * ranks) if drop_last else n
            assert metric(loaders) == list(range(whole))


def test_uneven_ranks_have_the_lengths_they_say() -> None:
    for n in range(1, 14):
        for ranks in (2, 3):
            for split in (False, True):
                source = DataLoader(range(n), batch_size=6 if split else 2)
                loaders = [
                    prepare(source, rank, ranks, split_batches=split, even_batches=False) for rank in range(ranks)
                ]
                lists = [epoch(loader) for loader in loaders]
                assert [len(loader) for loader in loaders] == [len(batches) for batches in lists]
                assert sorted(index for batches in lists for batch in batches for index in batch) == list(range(n))


def test_a_sampler_without_known_samples_still_has_the_right_uneven_length() -> None:
    class Custom(Sampler):
        batch_size = 4

        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 1, 2, 3]
            yield [4]

        def __len__(self) -> int:
            return 2

    source = DataLoader(range(5), batch_sampler=Custom())
    loaders = [prepare(source, rank, 2, split_batches=True, even_batches=False) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [2, 1]
    assert [epoch(loader) for loader in loaders] == [[[0, 1], [4]], [[2, 3]]]


def test_a_subset_sampler_counts_its_own_samples() -> None:
    chosen = [1, 2, 3, 5, 6, 7, 9]
    source = DataLoader(range(10), batch_size=2, sampler=SubsetRandomSampler(chosen))
    loaders = [prepare(source, rank, 2) for rank in range(2)]
    assert loaders[0].remainder == 3
    assert sorted(metric(loaders)) == chosen


def test_a_weighted_sampler_draws_the_same_on_all_ranks() -> None:
    source = DataLoader(range(5), batch_size=2, sampler=WeightedRandomSampler([1.0] * 5, 11))
    together = epoch(prepare(source))
    loaders = [prepare(source, rank, 2) for rank in range(2)]
    assert metric(loaders) == [index for batch in together for index in batch]


def test_the_order_of_a_users_sampler_is_law() -> None:
    source = DataLoader(range(8), batch_size=2, sampler=list(range(7, -1, -1)))
    assert epoch(prepare(source, 0, 2)) == [[7, 6], [3, 2]]
    assert epoch(prepare(source, 1, 2)) == [[5, 4], [1, 0]]


def test_twentyfour_samples_on_five_ranks_repeat_the_first_only() -> None:
    loaders = [prepare(DataLoader(range(24), batch_size=1), rank, 5) for rank in range(5)]
    drawn = [index for loader in loaders for batch in epoch(loader) for index in batch]
    assert sorted(drawn) == [0, *range(24)]
    assert sorted(metric(loaders)) == list(range(24))


def test_a_batch_sampler_passed_as_sampler_is_sharded_by_batches() -> None:
    class ByList(Dataset):
        def __getitem__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    sampler = BatchSampler(SequentialSampler(range(22)), 4, drop_last=False)
    source = DataLoader(ByList(), sampler=sampler, batch_size=None)
    loaders = [prepare(source, rank, 2) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert epoch(loaders[1]) == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 0, 1]]
    assert metric(loaders) == list(range(22))


def test_ready_made_batches_are_shared_out_whole() -> None:
    items = [torch.full((3, 2), index) for index in range(3)]
    source = DataLoader(items, batch_size=None)
    loaders = [prepare(source, rank, 2) for rank in range(2)]
    assert [[int(item[0, 0]) for item in loader] for loader in loaders] == [[0, 2], [1, 0]]
    kept = []
    for pair in zip(*loaders, strict=True):
        kept.append(loaders[0].rows.trim(torch.cat(pair), 3))
    assert torch.cat(kept)[:, 0].tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_batches_of_varying_size_are_repeated_whole_and_trimmed_exactly() -> None:
    batches = [[0, 1, 2], [3, 4], [5]]
    loaders = [prepare(DataLoader(range(6), batch_sampler=batches), rank, 2) for rank in range(2)]
    assert epoch(loaders[1]) == [[3, 4], [0, 1, 2]]
    assert metric(loaders) == [0, 1, 2, 3, 4, 5]


def test_a_process_that_feeds_several_shards_gets_their_batches_joined() -> None:
    source = DataLoader(range(10), batch_size=2)
    assert epoch(prepare(source, 0, 4, feeds=4)) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 1, 2, 3, 4, 5]]
    assert epoch(prepare(source, 2, 4, feeds=2)) == [[4, 5, 6, 7], [2, 3, 4, 5]]
    items = DataLoader([torch.full((2,), index) for index in range(4)], batch_size=None)
    assert epoch(prepare(items, 0, 2, feeds=2)) == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_split_names_both_numbers_when_they_do_not_divide() -> None:
    with pytest.raises(ValueError, match="batch size of 5 .* 2 data-parallel"):
        prepare(DataLoader(range(10), batch_size=5), 0, 2, split_batches=True)


# ---------------------------------------------------------------------------------------------------- already sharded


def test_a_distributed_sampler_is_not_sharded_again_and_says_so() -> None:
    lists = []
    for rank in range(2):
        sampler = DistributedSampler(range(16), num_replicas=2, rank=rank, shuffle=False)
        with pytest.warns(UserWarning, match="DistributedSampler shards the data already"):
            lists.append(epoch(prepare(DataLoader(range(16), batch_size=2, sampler=sampler), rank, 2)))
    assert sorted(index for batches in lists for batch in batches for index in batch) == list(range(16))


@pytest.mark.filterwarnings("error")
def test_already_sharded_keeps_placement_and_position_without_a_warning() -> None:
    sampler = DistributedSampler(range(16), num_replicas=2, rank=1, shuffle=False)
    source = DataLoader(range(16), batch_size=2, sampler=sampler)
    loader = prepare(source, 1, 2, place=lambda batch: batch + 100, already_sharded=True)
    assert next(iter(loader)).tolist() == [101, 103]
    assert len(loader) == 4
    assert loader.rows is None
    assert loader.remainder == -1


def test_a_distributed_sampler_for_another_world_is_refused() -> None:
    sampler = DistributedSampler(range(16), num_replicas=4, rank=0)
    with pytest.raises(ValueError, match="for 4 ranks, but this run has 2"):
        prepare(DataLoader(range(16), sampler=sampler), 0, 2)


def test_a_distributed_sampler_for_one_rank_does_not_shard() -> None:
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0, shuffle=False)
    assert epoch(prepare(DataLoader(range(8), batch_size=2, sampler=sampler), 1, 2)) == [[2, 3], [6, 7]]
