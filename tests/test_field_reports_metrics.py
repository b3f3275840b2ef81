"""Right values for reported faults in what metrics are given and what is reduced, where no other test has them.

Everything that needs ranks runs on real ones, in tasks that take milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.testing.pool import WorkerError
from drivetrain.utils import broadcast
from tests.streams import Numbers

SAMPLES = range(5)
"""In batches of two they fill the ranks' last round with repeated ones, whatever the number of ranks."""


def words(sample: int) -> list[str]:
    """As many as the sample's number, and one more."""
    return [f"{sample}.{word}" for word in range(sample + 1)]


def evaluate(make: Any) -> list[Any]:
    """What metrics over all samples get of ``make(batch)``."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(SAMPLES, batch_size=2))
    return [accelerator.gather_for_metrics(make(batch)) for batch in loader]


def arrays() -> tuple[list[int], list[int], list[float]]:
    found = evaluate(lambda batch: {"ids": batch.numpy(), "tensors": batch, "scores": batch.numpy()[:, None] * 0.5})
    assert all(type(one["ids"]) is np.ndarray for one in found)
    tensors = torch.cat([one["tensors"] for one in found]).tolist()
    ids, scores = (np.concatenate([one[name] for one in found]).flatten().tolist() for name in ("ids", "scores"))
    return ids, tensors, scores


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_arrays_are_joined_without_repeated_samples_like_tensors(worker_pool: Any, ranks: int) -> None:
    expected = (list(SAMPLES), list(SAMPLES), [sample * 0.5 for sample in SAMPLES])
    assert worker_pool(ranks).run(arrays) == [expected] * ranks


def nested(kind: str) -> list[Any]:
    each = {
        "words": words,
        "one text in a list": lambda sample: [str(sample)],
        "mapping": lambda sample: {"id": sample, "words": words(sample)},
        "object": lambda sample: {sample},
    }[kind]
    return [value for found in evaluate(lambda batch: [each(k) for k in batch.tolist()]) for value in found]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("words", [words(sample) for sample in SAMPLES]),
        ("one text in a list", [[str(sample)] for sample in SAMPLES]),
        ("mapping", [{"id": sample, "words": words(sample)} for sample in SAMPLES]),
        ("object", [{sample} for sample in SAMPLES]),
    ],
)
def test_a_nested_value_for_each_sample_stays_with_its_sample(
    worker_pool: Any, ranks: int, kind: str, expected: list[Any]
) -> None:
    assert worker_pool(ranks).run(nested, kind) == [expected] * ranks


def fields(kind: str) -> list[list[str]]:
    def make(batch: Tensor) -> Any:
        numbers = [str(k) for k in batch.tolist()]
        texts, upper = [f"p{k}" for k in numbers], [f"P{k}" for k in numbers]
        if kind == "tuple":
            return texts, upper
        return [texts, upper, texts] if kind == "list" else [tuple(texts), tuple(upper)]

    found = evaluate(make)
    return [[text for one in found for text in one[position]] for position in range(len(found[0]))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tuple", "list", "tuples of the collate function"])
def test_fields_of_texts_are_joined_each_with_its_like(worker_pool: Any, ranks: int, kind: str) -> None:
    texts, upper = ([f"{letter}{sample}" for sample in SAMPLES] for letter in "pP")
    expected = [texts, upper, texts] if kind == "list" else [texts, upper]
    assert worker_pool(ranks).run(fields, kind) == [expected] * ranks


def outside_of_loops() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    return [
        accelerator.gather([["a", "b"], [str(rank)]]),
        accelerator.gather(np.array(rank)).tolist(),
        accelerator.gather({"texts": [["a"]], "rank": rank}),
    ]


def test_nested_lists_are_joined_outside_of_loops_too(worker_pool: Any) -> None:
    lists = [["a", "b"], ["0"], ["a", "b"], ["1"]]
    assert worker_pool(2).run(outside_of_loops) == [[lists, [0, 1], {"texts": [["a"], ["a"]], "rank": [0, 1]}]] * 2


def gather_unlike_arrays() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gather(np.ones((2 + accelerator.process_index, 3)))


def test_arrays_of_different_shapes_are_the_same_error_on_all_ranks(worker_pool: Any) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 0: gather of \(2, 3\) float64\n  rank 1: gather of \(3, 3\) float64"
    ) as e:
        worker_pool(2).run(gather_unlike_arrays)
    assert len({error.message for error in e.value.errors}) == 1
    assert len(e.value.errors) == 2


def pad_then_gather(pad_first: bool) -> list[tuple[str, list[list[int]]]]:
    """One row on rank 0, two on rank 1, as an array and as a tensor."""
    accelerator = Accelerator(cpu=True)
    rows = np.full((1 + accelerator.process_index, 2), 7, dtype=np.int16)
    padded = accelerator.pad_across_processes((rows, torch.from_numpy(rows)), pad_index=-1, pad_first=pad_first)
    return [(str(found.dtype), found.tolist()) for found in accelerator.gather(padded)]


@pytest.mark.parametrize("pad_first", [False, True])
def test_arrays_are_padded_as_tensors_are(worker_pool: Any, pad_first: bool) -> None:
    first = [[-1, -1], [7, 7]] if pad_first else [[7, 7], [-1, -1]]
    rows = [*first, [7, 7], [7, 7]]
    assert worker_pool(2).run(pad_then_gather, pad_first) == [[("int16", rows), ("torch.int16", rows)]] * 2


# ------------------------------------------------------------------------------------------ ranks with unequal batches


def in_every_form(batch: Tensor) -> dict[str, Any]:
    """Two rows a sample, a flag and a text each, and a loss and counts of the rank."""
    return {
        "pairs": torch.stack([batch, -batch], dim=1).flatten(),
        "flags": batch % 2 == 0,
        "array": batch.numpy(),
        "texts": [str(sample) for sample in batch.tolist()],
        "loss": torch.tensor(1.0),
        "counts": torch.arange(5),
    }


def measure(loader: DataLoader[int], even: bool, dispatch: bool) -> dict[str, list[Any]]:
    configuration = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    found: dict[str, list[Any]] = defaultdict(list)
    for batch in accelerator.prepare(loader):
        for name, values in accelerator.gather_for_metrics(in_every_form(batch)).items():
            found[name] += values if isinstance(values, list) else values.tolist()
    assert found.pop("counts") == [0, 1, 2, 3, 4] * len(found.pop("loss"))
    return dict(found)


def measure_batches_of_their_own(even: bool, dispatch: bool) -> dict[str, list[Any]]:
    batches = [[0, 1, 2], [3], [4, 5], [6], [7, 8, 9]]
    return measure(DataLoader(range(10), batch_sampler=batches), even, dispatch)


def measure_seven(even: bool, dispatch: bool) -> dict[str, list[Any]]:
    return measure(DataLoader(range(7), batch_size=2), even, dispatch)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    ("task", "ranks", "even", "count"),
    [
        (measure_batches_of_their_own, 1, True, 10),
        (measure_batches_of_their_own, 2, True, 10),
        (measure_batches_of_their_own, 3, True, 10),
        (measure_seven, 2, False, 7),
    ],
)
def test_metrics_are_exact_where_ranks_have_batches_of_different_sizes(
    worker_pool: Any, task: Any, ranks: int, even: bool, count: int, dispatch: bool
) -> None:
    expected = {
        "pairs": [value for sample in range(count) for value in (sample, -sample)],
        "flags": [sample % 2 == 0 for sample in range(count)],
        "array": list(range(count)),
        "texts": [str(sample) for sample in range(count)],
    }
    assert worker_pool(ranks).run(task, even, dispatch) == [expected] * ranks


def gather_what_follows_no_batch() -> None:
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(range(5), batch_sampler=[[0, 1, 2], [3, 4]])):
        accelerator.gather_for_metrics(torch.zeros(len(batch) + 4))


def test_rows_that_follow_no_batch_are_the_same_error_on_all_ranks(worker_pool: Any) -> None:
    with pytest.raises(WorkerError, match="rank 0: 7 of a batch of 3\n  rank 1: 6 of a batch of 2") as caught:
        worker_pool(2).run(gather_what_follows_no_batch)
    assert len({error.message for error in caught.value.errors}) == 1
    assert len(caught.value.errors) == 2


@pytest.mark.parametrize("task", [measure_batches_of_their_own, measure_seven])
def test_a_rank_without_a_batch_is_named_where_others_would_wait_for_it(worker_pool: Any, task: Any) -> None:
    with pytest.raises(WorkerError, match=r"rank\(s\) .* have no batch in this round, since even_batches is off"):
        worker_pool(3).run(task, False, False)


# ------------------------------------------------------------------------------------------ what can only be a tensor


def combine(what: str, value: Any) -> None:
    accelerator = Accelerator(cpu=True)
    {"reduce": accelerator.reduce, "broadcast": broadcast}[what](value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", ["reduce", "broadcast"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(1.5, "float"), ({"x": torch.ones(1), "n": 3}, "int"), (np.ones(2), "ndarray"), ([None, "a"], "str")],
)
def test_numbers_and_texts_do_not_come_back_as_if_all_ranks_had_the_same(
    worker_pool: Any, ranks: int, what: str, value: Any, kind: str
) -> None:
    with pytest.raises(
        WorkerError, match=f"TypeError: {what} takes tensors, and there is a {kind} in the data"
    ) as caught:
        worker_pool(ranks).run(combine, what, value)
    assert len(caught.value.errors) == ranks


def reduce_with_a_gap() -> Any:
    return Accelerator(cpu=True).reduce({"loss": torch.ones(()), "extra": None})


def test_nothing_at_all_may_stand_in_what_is_reduced(worker_pool: Any) -> None:
    assert worker_pool(2).run(reduce_with_a_gap) == [{"loss": torch.tensor(2.0), "extra": None}] * 2


# ---------------------------------------------------------------------------------------------- loops inside of loops


def evaluate_inside_of_training() -> dict[str, list[Any]]:
    """Five micro-batches in groups of two, and a whole evaluation in each; every rank's last round differs."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    training = accelerator.prepare(DataLoader(range(5 * accelerator.num_processes), batch_size=1))
    evaluation = accelerator.prepare(DataLoader(SAMPLES, batch_size=2))
    seen: dict[str, list[Any]] = {"end": [], "sync": [], "inner": [], "outer": []}
    for batch in training:
        with accelerator.accumulate():
            found = [sample for one in evaluation for sample in accelerator.gather_for_metrics(one).tolist()]
            seen["inner"].append(found)
            seen["end"].append(accelerator.gradient_state.end_of_dataloader)
            seen["sync"].append(accelerator.sync_gradients)
            seen["outer"] += accelerator.gather_for_metrics(batch).tolist()
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_evaluation_inside_of_training_leaves_ends_groups_and_metrics_to_their_own_loader(
    worker_pool: Any, ranks: int
) -> None:
    expected = {
        "end": [False, False, False, False, True],
        "sync": [False, True, False, True, True],
        "inner": [list(SAMPLES)] * 5,
        "outer": list(range(5 * ranks)),
    }
    assert worker_pool(ranks).run(evaluate_inside_of_training) == [expected] * ranks


# ------------------------------------------------------------------------------------------------- dispatched batches


def with_words(samples: list[int]) -> dict[str, Any]:
    made: dict[str, Any] = defaultdict(list)
    made |= {"x": torch.tensor(samples), "name": [f"s{k}" for k in samples], "words": [words(k) for k in samples]}
    return made


def dispatch_words(split: bool) -> list[tuple[int, list[int], list[str], list[list[str]]]]:
    """For streams of several lengths what a metric gets; every batch must be whole in itself."""
    accelerator = Accelerator(cpu=True, split_batches=split)
    seen = []
    for count in range(1, 8):
        loader = accelerator.prepare(DataLoader(Numbers(count), batch_size=4 if split else 2, collate_fn=with_words))
        found: dict[str, list[Any]] = {"x": [], "name": [], "words": []}
        for batch in loader:
            assert type(batch) is defaultdict
            assert batch.default_factory is list
            assert batch == with_words(batch["x"].tolist()) | {"x": batch["x"]}
            for name, values in accelerator.gather_for_metrics(batch).items():
                found[name] += values.tolist() if isinstance(values, Tensor) else values
        seen.append((count, found["x"], found["name"], found["words"]))
    return seen


@pytest.mark.parametrize("split", [False, True])
def test_texts_at_the_end_of_a_dispatched_stream_stay_with_their_samples(worker_pool: Any, split: bool) -> None:
    expected = [
        (count, list(range(count)), [f"s{k}" for k in range(count)], [words(k) for k in range(count)])
        for count in range(1, 8)
    ]
    assert worker_pool(2).run(dispatch_words, split) == [expected] * 2
