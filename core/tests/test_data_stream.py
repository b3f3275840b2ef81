"""Streams that every rank reads whole, and rows of loaded batches."""

from __future__ import annotations

import functools
import random
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.tests import loaders
from core.tests.loaders import epoch, metric
from drivetrain.data.collated import Collated, CollatedPieces, concatenate, join_rows, leading_rows, take_rows
from drivetrain.data.loader import DataLoaderDispatcher

prepare = functools.partial(loaders.prepare, dispatch_batches=False)
"""Every rank reads."""


class Stream(IterableDataset):
    """The numbers below ``n``; with ``sized``, it has a length."""

    def __init__(self, n: int, shuffled: bool = False) -> None:
        self.n = n
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        numbers = list(range(self.n))
        if self.shuffled:
            random.shuffle(numbers)
        yield from numbers if worker is None else numbers[worker.id :: worker.num_workers]


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_sharded_like_a_list(ranks: int, split: bool, drop_last: bool) -> None:
    for n in range(1, 14):
        for share in range(1, 4):
            size = share * ranks if split else share
            options: dict[str, Any] = {"batch_size": size, "drop_last": drop_last}
            streams = [
                prepare(DataLoader(SizedStream(n), **options), rank, ranks, split_batches=split)
                for rank in range(ranks)
            ]
            lists = [
                prepare(DataLoader(range(n), **options), rank, ranks, split_batches=split) for rank in range(ranks)
            ]
            got = [epoch(loader) for loader in streams]
            assert got == [epoch(loader) for loader in lists]
            assert [len(loader) for loader in streams] == [len(batches) for batches in got]
            assert metric(streams) == metric(lists)


def test_three_samples_in_batches_of_two_are_completed_from_the_first() -> None:
    loaders = [prepare(DataLoader(Stream(3), batch_size=2), rank, 2) for rank in range(2)]
    assert [epoch(loader) for loader in loaders] == [[[0, 1]], [[2, 0]]]
    assert metric(loaders) == [0, 1, 2]


def test_uneven_streams_have_their_real_sizes() -> None:
    loaders = [prepare(DataLoader(Stream(7), batch_size=2), rank, 2, even_batches=False) for rank in range(2)]
    assert [epoch(loader) for loader in loaders] == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_a_rank_without_a_part_in_the_last_round_knows_its_last_batch() -> None:
    loaders = [prepare(DataLoader(Stream(5), batch_size=2), rank, 2, even_batches=False) for rank in range(2)]
    assert [[loader.end_of_dataloader for _ in loader] for loader in loaders] == [[False, True], [True]]


@pytest.mark.parametrize("split", [False, True])
def test_a_stream_is_divided_once(split: bool) -> None:
    collated = []

    def collate(samples: list[int]) -> torch.Tensor:
        collated.append(len(samples))
        return torch.tensor(samples)

    loader = prepare(DataLoader(Stream(64), batch_size=16, collate_fn=collate), 1, 2, split_batches=split)
    assert {len(batch) for batch in epoch(loader)} == {8 if split else 16}
    assert set(collated) == {16}


def test_several_workers_with_short_batches_of_their_own_lose_nothing() -> None:
    loaders = [prepare(DataLoader(Stream(13), batch_size=2, num_workers=2), rank, 2) for rank in range(2)]
    assert sorted(metric(loaders)) == list(range(13))


def test_a_shuffled_stream_is_the_same_on_all_ranks() -> None:
    seen = []
    for rank in range(2):
        random.seed(rank)
        seen += [
            index for batch in epoch(prepare(DataLoader(Stream(12, True), batch_size=2), rank, 2)) for index in batch
        ]
    assert sorted(seen) == list(range(12))
    assert seen != list(range(12))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_stream_goes_on_with_the_same_order(ranks: int) -> None:
    unbroken = prepare(DataLoader(Stream(12, True), batch_size=2), 0, ranks)
    expected = [epoch(unbroken), epoch(unbroken)]
    loader = prepare(DataLoader(Stream(12, True), batch_size=2), 0, ranks)
    iterator = iter(loader)
    first = [next(iterator).tolist()]
    state = loader.state_dict()
    random.seed(123)
    resumed = prepare(DataLoader(Stream(12, True), batch_size=2), 0, ranks)
    resumed.load_state_dict(state)
    assert [first + epoch(resumed), epoch(resumed)] == expected


def test_the_last_batch_of_a_stream_is_known_when_it_is_handed_out() -> None:
    loader = prepare(DataLoader(Stream(5), batch_size=2))
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    with pytest.raises(TypeError):
        len(loader)
    list(loader)
    assert loader.state_dict()["epoch"] == 2


def test_a_stream_that_shards_itself_is_left_alone() -> None:
    class Own(Stream):
        drivetrain_sharded = True

    loader = prepare(DataLoader(Own(4), batch_size=2), 1, 2, dispatch_batches=None)
    assert epoch(loader) == [[0, 1], [2, 3]]
    assert loader.rows is None


def test_a_process_that_feeds_several_shards_gets_them_joined() -> None:
    assert epoch(prepare(DataLoader(Stream(6), batch_size=2), 0, 2, feeds=2)) == [[0, 1, 2, 3], [4, 5, 0, 1]]


def test_an_empty_stream_gives_nothing() -> None:
    assert epoch(prepare(DataLoader(Stream(0), batch_size=2), 0, 2)) == []


def test_batches_padded_to_lengths_of_their_own_are_completed_with_their_own_rows() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor([[sample] * (max(samples) + 1) for sample in samples])

    loaders = [prepare(DataLoader(Stream(7), batch_size=2, collate_fn=collate), rank, 2) for rank in range(2)]
    tails = [list(loader)[-1] for loader in loaders]
    assert [tail[:, 0].tolist() for tail in tails] == [[4, 5], [6, 6]]
    assert loaders[0].rows.real == (2, 1)


def test_rows_are_counted_in_samples_where_a_sample_has_several() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples).repeat_interleave(3)

    loaders = [prepare(DataLoader(Stream(3), batch_size=2, collate_fn=collate), rank, 2) for rank in range(2)]
    assert metric(loaders) == [0] * 3 + [1] * 3 + [2] * 3


# --------------------------------------------------------------------------------------------- rows of loaded batches


Pair = namedtuple("Pair", ["x", "name"])


def a_batch(first: int, rows: int) -> dict[str, Any]:
    samples = list(range(first, first + rows))
    return {
        "x": torch.tensor(samples),
        "array": np.array(samples),
        "name": [f"s{sample}" for sample in samples],
        "boxes": [torch.zeros(sample + 5, 4) for sample in samples],
        "flag": True,
        "scale": torch.tensor(2.0),
        "two": torch.tensor(samples).repeat_interleave(2),
        "nested": Pair(torch.tensor(samples), tuple(map(str, samples))),
    }


def check(batch: dict[str, Any], samples: list[int]) -> None:
    assert batch["x"].tolist() == batch["array"].tolist() == samples
    assert batch["name"] == [f"s{sample}" for sample in samples]
    assert [len(boxes) for boxes in batch["boxes"]] == [sample + 5 for sample in samples]
    assert batch["flag"] is True
    assert batch["scale"].item() == 2.0
    assert batch["two"].tolist() == [sample for sample in samples for _ in range(2)]
    assert isinstance(batch["nested"], Pair)
    assert batch["nested"].x.tolist() == samples
    assert batch["nested"].name == tuple(map(str, samples))


def test_taking_rows_cuts_what_has_one_entry_a_sample_and_copies_the_rest() -> None:
    check(take_rows(a_batch(0, 5), 5, 1, 4), [1, 2, 3])


def test_joining_rows_is_the_reverse_of_taking_them() -> None:
    parts = [Collated(2, a_batch(0, 2)), Collated(1, a_batch(7, 1)), Collated(3, a_batch(2, 3))]
    check(join_rows(parts), [0, 1, 7, 2, 3, 4])


def test_a_list_of_two_tensors_in_a_batch_of_two_is_a_structure_not_two_samples() -> None:
    batch = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    assert [part.tolist() for part in take_rows(batch, 2, 0, 1)] == [[0], [2]]
    assert [part.tolist() for part in join_rows([Collated(2, batch), Collated(2, batch)])] == [
        [0, 1, 0, 1],
        [2, 3, 2, 3],
    ]


def test_containers_keep_their_type() -> None:
    batch: Any = defaultdict(list, x=torch.tensor([1, 2, 3]))
    taken = take_rows(batch, 3, 0, 2)
    assert taken.default_factory is list
    assert taken["x"].tolist() == [1, 2]


def test_batches_of_different_structure_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="different numbers of entries"):
        join_rows([Collated(1, {"x": torch.zeros(1)}), Collated(1, {"x": torch.zeros(1), "y": torch.zeros(1)})])
    with pytest.raises(ValueError, match=r"\(1, 5\), \(2, 7\)"):
        join_rows([Collated(1, torch.zeros(1, 5)), Collated(2, torch.zeros(2, 7))])


def test_filling_falls_back_to_a_batchs_own_rows() -> None:
    pieces = CollatedPieces()
    filled = pieces.fill(Collated(2, torch.tensor([[1, 1], [2, 2]])), [Collated(3, torch.zeros(3, 9))], 3)
    assert (filled.rows, filled.data[:, 0].tolist()) == (5, [1, 2, 1, 2, 1])


def test_concatenating_joins_every_tensor_whatever_its_rows() -> None:
    joined = concatenate(
        [
            {"x": torch.zeros(2), "y": torch.zeros(5, 3), "s": ["a"]},
            {"x": torch.zeros(1), "y": torch.zeros(3, 3), "s": ["b", "c"]},
        ]
    )
    assert (len(joined["x"]), len(joined["y"]), joined["s"]) == (3, 8, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("batch", "rows"),
    [(torch.zeros(4, 2), 4), ({"a": 1, "x": torch.zeros(3)}, 3), (["a", "b"], 2), (5, 1), ({"s": ["a", "b"]}, 2)],
)
def test_rows_of_a_batch_of_unknown_making(batch: Any, rows: int) -> None:
    assert leading_rows(batch) == rows


@pytest.mark.parametrize("dispatch", [None, True])
def test_a_process_that_feeds_all_shards_dispatches_to_nobody(dispatch: bool | None) -> None:
    loader = loaders.prepare(DataLoader(Stream(6), batch_size=2), 0, 4, feeds=4, dispatch_batches=dispatch)
    assert not isinstance(loader, DataLoaderDispatcher)
    assert epoch(loader) == [[0, 1, 2, 3, 4, 5, 0, 1]]
