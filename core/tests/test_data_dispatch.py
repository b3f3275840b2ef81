"""Dispatching from rank 0, with each rank a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data.configuration import DataLoaderConfiguration
from drivetrain.data.loader import DataLoaderDispatcher
from drivetrain.data.preparing import prepare_loader
from drivetrain.data.skipping import skip_first_batches
from drivetrain.errors import DrivetrainError

TIMEOUT = 15.0


class Meeting:
    """Where the threads of a test meet. Counts the collectives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.value: Any = None
        self.calls = [0] * size


class ThreadCollectives:
    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, size

    def _broadcast(self, value: Any, source: int) -> Any:
        self.meeting.calls[self.rank] += 1
        if self.rank == source:
            self.meeting.value = value
        self.meeting.barrier.wait()
        received = self.meeting.value
        self.meeting.barrier.wait()
        return received

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self._broadcast(value, source)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        received = self._broadcast(tensor, source)
        assert received.shape == tensor.shape
        assert received.dtype == tensor.dtype
        return received.clone()


def on_ranks(size: int, body: Callable[[int, ThreadCollectives], Any]) -> tuple[list[Any], Meeting]:
    """What ``body`` returns or raises on each rank."""
    meeting, results = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank, ThreadCollectives(meeting, rank, size))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "a rank hangs"
    return results, meeting


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        yield from range(self.n)


def prepare(loader: Any, rank: int, collectives: ThreadCollectives, **options: Any) -> Any:
    place = options.pop("place", None)
    return prepare_loader(
        loader,
        data_rank=rank,
        data_size=collectives.size,
        place=place,
        configuration=DataLoaderConfiguration(**options),
        gate=options.pop("gate", None),
        base_seed=7,
        collectives=collectives,
    )


def lists_of(size: int, make: Callable[[], Any], **options: Any) -> list[Any]:
    def body(rank: int, collectives: ThreadCollectives) -> Any:
        loader = prepare(make(), rank, collectives, **options)
        assert isinstance(loader, DataLoaderDispatcher)
        return [(batch, loader.rows) for batch in loader]

    return on_ranks(size, body)[0]


def metric(per_rank: list[list[Any]]) -> list[int]:
    found: list[int] = []
    for parts in zip(*per_rank, strict=True):
        batches, rows = [batch for batch, _ in parts], parts[-1][1]
        found += rows.trim(torch.cat(batches), len(batches[-1])).tolist()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["stream", "map"])
def test_every_sample_once_and_no_hang_over_a_sweep(ranks: int, split: bool, drop_last: bool, kind: str) -> None:
    for n in (1, 2, 3, 5, 6, 11, 12, 13):
        for share in (1, 2, 3):
            size = share * ranks if split else share
            data = Stream(n) if kind == "stream" else range(n)
            got = lists_of(
                ranks,
                lambda data=data, size=size: DataLoader(data, batch_size=size, drop_last=drop_last),
                split_batches=split,
                dispatch_batches=True,
            )
            whole = n - n % (share * ranks) if drop_last else n
            assert metric(got) == list(range(whole))
            assert {len(batch) for batches in got for batch, _ in batches} <= {share}


def test_streams_are_dispatched_by_default_and_batches_go_in_turn() -> None:
    got = lists_of(2, lambda: DataLoader(Stream(10), batch_size=2))
    assert [[batch.tolist() for batch, _ in batches] for batches in got] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]


def test_only_rank_0_reads() -> None:
    readers = []

    class Watched(Stream):
        def __iter__(self) -> Iterator[int]:
            readers.append(self.n)
            yield from range(8)

    def body(rank: int, collectives: ThreadCollectives) -> Any:
        return list(prepare(DataLoader(Watched(rank), batch_size=2), rank, collectives))

    on_ranks(2, body)
    assert readers == [0]


def test_strings_are_shared_out_and_scalars_are_copied() -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(samples), "name": [f"s{sample}" for sample in samples], "flag": True}

    for size, split in ((2, False), (4, True)):
        got = lists_of(
            2, lambda size=size: DataLoader(Stream(8), batch_size=size, collate_fn=collate), split_batches=split
        )
        firsts = [batches[0][0] for batches in got]
        assert [first["x"].tolist() for first in firsts] == [[0, 1], [2, 3]]
        assert [first["name"] for first in firsts] == [["s0", "s1"], ["s2", "s3"]]
        assert [first["flag"] for first in firsts] == [True, True]


def test_all_dtypes_and_shapes_arrive() -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        x = torch.tensor(samples)
        return {
            "odd": (x.to(torch.uint8)[:, None] + torch.zeros(1, 3)).to(torch.uint8),
            "bool": x > 2,
            "half": x.to(torch.bfloat16),
            "complex": x.to(torch.complex64),
            "scalar": torch.tensor(float(samples[0])),
            "none": torch.zeros(0, 4),
            "strided": torch.stack([x, x + 1]).T,
            "sparse": torch.eye(2).to_sparse(),
        }

    got = lists_of(2, lambda: DataLoader(Stream(4), batch_size=2, collate_fn=collate))
    for rank, samples in ((0, [0, 1]), (1, [2, 3])):
        sent, received = collate(samples), got[rank][0][0]
        for key, value in sent.items():
            assert received[key].dtype == value.dtype
            assert received[key].shape == value.shape
            assert torch.equal(received[key].to_dense() if key == "sparse" else received[key], value.to_dense())


def test_batches_of_different_shapes_each_reach_their_rank() -> None:
    def collate(samples: list[int]) -> Tensor:
        return torch.zeros(len(samples), samples[0] + 1)

    got = lists_of(2, lambda: DataLoader(Stream(4), batch_size=2, collate_fn=collate))
    assert [batches[0][0].shape for batches in got] == [(2, 1), (2, 3)]


def test_uneven_ranks_stop_without_waiting_for_each_other() -> None:
    def body(rank: int, collectives: ThreadCollectives) -> Any:
        loader = prepare(DataLoader(Stream(3), batch_size=1), rank, collectives, even_batches=False)
        return [(batch.tolist(), loader.end_of_dataloader) for batch in loader]

    results, meeting = on_ranks(2, body)
    assert results == [[([0], False), ([2], True)], [([1], True)]]
    assert meeting.calls[0] == meeting.calls[1]


def test_an_uneven_rank_without_data_gets_nothing() -> None:
    got = lists_of(3, lambda: DataLoader(Stream(2), batch_size=1), even_batches=False)
    assert [len(batches) for batches in got] == [1, 1, 0]


def test_evening_concerns_dispatched_loaders_too() -> None:
    def body(rank: int, collectives: ThreadCollectives) -> Any:
        loader = prepare(DataLoader(Stream(3), batch_size=1), rank, collectives)
        with loader.evening(False):
            uneven = len(list(loader))
        return uneven, len(list(loader))

    assert on_ranks(2, body)[0] == [(2, 2), (1, 2)]


def test_an_empty_stream_ends_on_all_ranks() -> None:
    assert lists_of(2, lambda: DataLoader(Stream(0), batch_size=1)) == [[], []]


class PickyError(Exception):
    """Can't be rebuilt from its message alone."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.parametrize(
    ("error", "elsewhere"), [(KeyError("sample 3"), KeyError), (PickyError("sample 3", "torn"), DrivetrainError)]
)
def test_an_error_while_reading_is_raised_on_all_ranks(error: Exception, elsewhere: type[Exception]) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise error

    results = lists_of_results(2, lambda: DataLoader(Broken(6), batch_size=1))
    assert results[0] is error
    assert type(results[1]) is elsewhere
    assert "sample 3" in str(results[1])


def lists_of_results(size: int, make: Callable[[], Any]) -> list[Any]:
    return on_ranks(size, lambda rank, collectives: list(prepare(make(), rank, collectives)))[0]


def test_an_error_elsewhere_says_which_rank_read(notes_of: Callable[[BaseException], list[str]]) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            raise ValueError("torn")

    results = lists_of_results(2, lambda: DataLoader(Broken(1), batch_size=1))
    assert any("rank 0" in note for note in notes_of(results[1]))


def test_what_cannot_be_sent_is_an_error_on_all_ranks_and_no_hang() -> None:
    results = lists_of_results(
        2, lambda: DataLoader(Stream(2), batch_size=1, collate_fn=lambda samples: {"f": lambda: samples})
    )
    assert all(isinstance(result, Exception) for result in results)


def test_map_style_data_is_dispatched_with_a_known_length() -> None:
    def body(rank: int, collectives: ThreadCollectives) -> Any:
        loader = prepare(DataLoader(range(10), batch_size=2, shuffle=True), rank, collectives, dispatch_batches=True)
        return len(loader), [index for batch in loader for index in batch.tolist()], loader.remainder

    results, _ = on_ranks(2, body)
    assert [length for length, _, _ in results] == [3, 3]
    assert set(results[0][1] + results[1][1]) == set(range(10))
    assert results[1][2] == 2


def test_a_parts_memory_is_its_own() -> None:
    got = lists_of(2, lambda: DataLoader(Stream(4), batch_size=2))
    assert all(batch.untyped_storage().nbytes() == 16 for batches in got for batch, _ in batches)


def test_a_dispatched_loader_resumes_where_it_was() -> None:
    def body(rank: int, collectives: ThreadCollectives) -> Any:
        loader = prepare(DataLoader(Stream(12), batch_size=2), rank, collectives)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in iterator]
        fresh = prepare(DataLoader(Stream(12), batch_size=2), rank, collectives)
        fresh.load_state_dict(state)
        return rest, [batch.tolist() for batch in fresh], [batch.tolist() for batch in fresh]

    for rest, resumed, whole in on_ranks(2, body)[0]:
        assert resumed == rest
        assert len(whole) == 3


def images(samples: list[int]) -> dict[str, Tensor]:
    return {"text": torch.tensor(samples), "image": torch.arange(5) + 10 * samples[0]}


def by_image(data: Any, part: slice, process_index: int, num_processes: int) -> Any:
    bounds = [slice(0, 2), slice(2, 5)]
    return {"text": data["text"][part], "image": data["image"][bounds[process_index]]}


def test_a_slice_function_cuts_each_round_and_survives_skipping() -> None:
    def body(rank: int, collectives: ThreadCollectives) -> Any:
        source = DataLoader(Stream(8), batch_size=2, collate_fn=images)
        loader = prepare(source, rank, collectives, split_batches=True, slice_fn_for_dispatch=by_image)
        return list(loader), list(skip_first_batches(loader, 1))

    results, _ = on_ranks(2, body)
    for rank, images_per_rank in ((0, 2), (1, 3)):
        whole, skipped = results[rank]
        assert len(whole) == 4
        assert len(skipped) == 3
        assert {len(batch["image"]) for batch in whole + skipped} == {images_per_rank}
        assert [batch["text"].tolist() for batch in whole] == [[2 * step + rank] for step in range(4)]
        assert torch.equal(skipped[0]["image"], whole[1]["image"])


def test_a_slice_function_gets_the_joined_batches_of_a_round() -> None:
    seen = []

    def whole(data: Any, part: slice, process_index: int, num_processes: int) -> Any:
        seen.append((data["image"].tolist(), part, process_index, num_processes))
        return data["text"][part]

    lists_of(2, lambda: DataLoader(Stream(4), batch_size=2, collate_fn=images), slice_fn_for_dispatch=whole)
    joined = [*range(5), *range(20, 25)]
    assert seen == [(joined, slice(0, 2), 0, 2), (joined, slice(2, 4), 1, 2)]


def test_dispatching_without_collectives_is_refused() -> None:
    with pytest.raises(ValueError, match="needs collectives"):
        prepare_loader(
            DataLoader(Stream(4)),
            data_rank=0,
            data_size=2,
            place=None,
            configuration=DataLoaderConfiguration(),
            gate=None,
            base_seed=1,
            collectives=None,
        )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"split_batches": "yes"}, TypeError, "split_batches"),
        ({"data_seed": 1.5}, TypeError, "data_seed"),
        ({"slice_fn_for_dispatch": 3}, TypeError, "must be a function"),
        ({"already_sharded": True, "dispatch_batches": True}, ValueError, "leave one of them out"),
        ({"slice_fn_for_dispatch": by_image, "dispatch_batches": False}, ValueError, "has no effect"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DataLoaderConfiguration(**options)
