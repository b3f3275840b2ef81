"""Who gets which samples, against an oracle that thinks in samples where the plan thinks in batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.plan import IndexPieces, KeyPieces, Sharding
from drivetrain.data.rows import Rows


def batches_of(n: int, size: int, drop_last: bool) -> list[list[int]]:
    """What torch's batch sampler makes of ``range(n)``."""
    made = [list(range(start, min(start + size, n))) for start in range(0, n, size)]
    return [batch for batch in made if len(batch) == size] if drop_last else made


def dealt(n: int, size: int, **options: Any) -> list[Any]:
    sharding = Sharding(batch_size=size, **options)
    return list(sharding.rounds(batches_of(n, size, sharding.drop_last), IndexPieces()))


def oracle(
    n: int, size: int, ranks: int, *, split: bool, even: bool, drop_last: bool
) -> list[list[tuple[list[int], int]]]:
    """For each round the samples of each rank and how many are real, worked out sample by sample."""
    share = size // ranks if split else size
    per_round = share * ranks
    if drop_last:
        n -= n % per_round
    rounds = []
    for start in range(0, n, per_round):
        parts = []
        for rank in range(ranks):
            places = range(start + rank * share, start + (rank + 1) * share)
            kept = places if even and ranks > 1 else [place for place in places if place < n]
            parts.append(([place % n for place in kept], sum(place < n for place in places)))
        rounds.append(parts)
    return rounds


cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40),
        "share": st.integers(1, 5),
        "ranks": st.integers(1, 5),
        "split": st.booleans(),
        "even": st.booleans(),
        "drop_last": st.booleans(),
    }
)


@settings(max_examples=300, deadline=None)
@given(cases)
def test_every_rank_gets_what_the_oracle_says(case: dict[str, Any]) -> None:
    size = case["share"] * case["ranks"] if case["split"] else case["share"]
    options = {key: case[key] for key in ("split", "even", "drop_last")}
    expected = oracle(case["n"], size, case["ranks"], **options)
    made = dealt(case["n"], size, data_size=case["ranks"], **options)
    assert [
        [([] if part is None else list(part), real) for part, real in zip(one.parts, one.rows.real, strict=True)]
        for one in made
    ] == expected
    assert [one.rows.sizes for one in made] == [tuple(len(part) for part, _ in parts) for parts in expected]


@settings(max_examples=200, deadline=None)
@given(cases)
def test_count_is_the_number_of_rounds_in_which_a_rank_gets_something(case: dict[str, Any]) -> None:
    size = case["share"] * case["ranks"] if case["split"] else case["share"]
    options = {key: case[key] for key in ("split", "even", "drop_last")}
    batches = batches_of(case["n"], size, case["drop_last"])
    for rank in range(case["ranks"]):
        sharding = Sharding(batch_size=size, data_size=case["ranks"], data_rank=rank, **options)
        got = sum(made.parts[rank] is not None for made in sharding.rounds(batches, IndexPieces()))
        assert sharding.count(len(batches), sum(map(len, batches))) == got


@settings(max_examples=200, deadline=None)
@given(cases)
def test_real_rows_are_every_sample_exactly_once(case: dict[str, Any]) -> None:
    size = case["share"] * case["ranks"] if case["split"] else case["share"]
    made = dealt(case["n"], size, data_size=case["ranks"], split=case["split"], even=case["even"])
    real = [
        index
        for one in made
        for part, count in zip(one.parts, one.rows.real, strict=True)
        for index in (part or [])[:count]
    ]
    assert real == list(range(case["n"]))


def test_batches_go_to_ranks_in_turn_and_the_tail_goes_on_from_the_start() -> None:
    made = dealt(10, 2, data_size=2)
    assert [one.parts for one in made] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [0, 1]]]
    assert made[-1].rows.real == (2, 0)


def test_split_gives_contiguous_parts_of_each_batch() -> None:
    made = dealt(10, 4, data_size=2, split=True)
    assert [one.parts for one in made] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [0, 1]]]


def test_one_sample_for_many_ranks_is_repeated() -> None:
    (made,) = dealt(1, 4, data_size=3)
    assert made.parts == [[0, 0, 0, 0]] * 3
    assert made.rows.real == (1, 0, 0)


def test_uneven_rounds_have_their_real_sizes() -> None:
    made = dealt(7, 2, data_size=2, even=False)
    assert [one.rows.sizes for one in made] == [(2, 2), (2, 1)]
    assert [one.rows.sizes for one in dealt(3, 1, data_size=2, even=False)] == [(1, 1), (1, 0)]


def test_one_process_gets_batches_as_they_are() -> None:
    assert [one.parts[0] for one in dealt(5, 2)] == [[0, 1], [2, 3], [4]]


def test_split_refuses_a_batch_size_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match=r"batch size of 6 .* 4 data-parallel ranks"):
        Sharding(batch_size=6, data_size=4, split=True)


def test_batches_of_sizes_of_their_own_are_repeated_whole() -> None:
    batches = [[0, 1, 2], [3], [4, 5]]
    made = list(Sharding(data_size=2).rounds(batches, IndexPieces()))
    assert [one.parts for one in made] == [[[0, 1, 2], [3]], [[4, 5], [0, 1, 2]]]
    assert (made[1].rows.real, made[1].rows.sizes) == ((2, 0), (2, 3))


def test_a_short_batch_in_the_middle_is_filled_where_the_size_is_known() -> None:
    batches = [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]
    made = list(Sharding(data_size=2, batch_size=2).rounds(batches, IndexPieces()))
    assert [one.parts for one in made] == [[[0, 1], [2, 3]], [[4, 0], [5, 6]], [[7, 8], [9, 0]]]
    assert [one.rows.real for one in made] == [(2, 2), (1, 2), (2, 1)]


def test_split_of_varying_batches_cuts_each_by_its_own_size() -> None:
    made = list(Sharding(data_size=2, split=True).rounds([[0, 1, 2, 3], [4, 5, 6]], IndexPieces()))
    assert [one.parts for one in made] == [[[0, 1], [2, 3]], [[4, 5], [6, 0]]]
    assert made[1].rows.real == (2, 1)


def test_keys_count_as_one_whatever_they_look_like() -> None:
    made = list(Sharding(data_size=2).rounds(["a0", "b1", "c2"], KeyPieces()))
    assert [one.parts for one in made] == [["a0", "b1"], ["c2", "a0"]]
    assert made[1].rows.real == (1, 0)


def test_a_process_that_feeds_several_shards_counts_rows_of_all_of_them() -> None:
    sharding = Sharding(data_size=4, data_rank=2, feeds=2, batch_size=3)
    (made,) = sharding.rounds(batches_of(10, 3, False), IndexPieces())
    assert made.parts[sharding.own] == [[6, 7, 8], [9, 0, 1]]
    assert made.rows.own == 6
    assert sharding.own_batch_size == 6


def test_rounds_are_dealt_out_without_reading_ahead() -> None:
    asked = []

    def batches() -> Any:
        for start in range(0, 100, 2):
            asked.append(start)
            yield [start, start + 1]

    rounds = Sharding(data_size=3, batch_size=2).rounds(batches(), IndexPieces())
    next(rounds)
    assert asked == [0, 2, 4]


# ------------------------------------------------------------------------------------------------------------- metrics


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_trimming_keeps_the_first_real_rows_of_each_rank(shards: list[tuple[int, int]], per_row: int) -> None:
    real, sizes = [r for r, _ in shards], [r + extra for r, extra in shards]
    rows = Rows(tuple(real), tuple(sizes), sizes[0])
    entries = [(shard, row, copy) for shard, size in enumerate(sizes) for row in range(size) for copy in range(per_row)]
    gathered = torch.arange(len(entries))
    kept = [place for place, (shard, row, _) in enumerate(entries) if row < real[shard]]
    if sizes[0] == 0:
        kept = list(range(len(entries)))  # a rank without rows can't tell how many a sample has
    assert rows.trim(gathered, sizes[0] * per_row).tolist() == kept
    assert rows.trim(list(range(len(entries))), sizes[0] * per_row) == kept


@pytest.mark.parametrize("shape", [(), (2,), (7, 3)])
def test_what_has_no_rows_of_the_batch_is_left_alone(shape: tuple[int, ...]) -> None:
    rows = Rows((2, 0), (2, 2), 2)
    value = torch.zeros(shape)
    assert rows.trim(value, shape[0] // 2 if shape else 0) is value
