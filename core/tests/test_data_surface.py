"""What a prepared loader shows, keeps and tells while it is iterated."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
)

from core.tests.loaders import epoch, metric, prepare
from drivetrain.data.loader import DataLoaderShard


def test_a_prepared_loader_is_a_dataloader_and_is_prepared_once() -> None:
    source = DataLoader(range(10), batch_size=2, num_workers=0, collate_fn=torch.tensor)
    loader = prepare(source, 0, 2)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert prepare(loader, 0, 2) is loader
    assert loader.dataset is source.dataset
    assert loader.collate_fn is torch.tensor
    assert (loader.batch_size, loader.total_batch_size, loader.drop_last) == (2, 4, False)
    assert loader.batch_sampler is source.batch_sampler
    assert loader.multiprocessing_context is None
    with pytest.raises(AttributeError):
        loader.unheard_of
    split = prepare(DataLoader(range(8), batch_size=4), 0, 2, split_batches=True)
    assert (split.batch_size, split.total_batch_size) == (2, 4)


def test_settings_of_a_prepared_loader_cannot_be_changed_in_vain() -> None:
    loader = prepare(DataLoader(range(10), batch_size=2))
    for name in ("collate_fn", "batch_size", "multiprocessing_context"):
        with pytest.raises(ValueError, match=f"{name} of a prepared loader"):
            setattr(loader, name, None)
    loader.note = "mine"
    assert loader.note == "mine"


def test_what_is_no_dataloader_is_refused() -> None:
    with pytest.raises(TypeError, match="not list"):
        prepare([1, 2])


def test_methods_and_attributes_of_a_loader_class_stay() -> None:
    class Mine(DataLoader):
        def hello(self) -> str:
            return f"hello from {self.name}"

    source = Mine(range(6), batch_size=2)
    source.name = "mine"
    assert prepare(source, 0, 2).hello() == "hello from mine"


def test_a_loader_class_with_its_own_iteration_keeps_it_and_is_dealt_out() -> None:
    class Doubling(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch * 2

    source = Doubling(range(7), batch_size=2)
    assert epoch(prepare(source)) == [[0, 2], [4, 6], [8, 10], [12]]
    with pytest.warns(UserWarning, match="Doubling has its own way of iterating"):
        loaders = [prepare(source, rank, 2) for rank in range(2)]
    assert [epoch(loader) for loader in loaders] == [[[0, 2], [8, 10]], [[4, 6], [12, 0]]]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert metric(loaders) == [0, 2, 4, 6, 8, 10, 12]


def test_a_shuffled_loader_class_with_its_own_iteration_agrees_between_ranks() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()

    source = Own(range(8), batch_size=2, shuffle=True)
    with pytest.warns(UserWarning, match="own way"):
        loaders = [prepare(source, rank, 2) for rank in range(2)]
    lists = []
    for seed, loader in enumerate(loaders):
        torch.manual_seed(seed)  # ranks seeded apart
        lists.append(epoch(loader))
    assert sorted(index for batches in lists for batch in batches for index in batch) == list(range(8))


def test_batches_are_placed_and_keep_their_type() -> None:
    def collate(samples: list[int]) -> Any:
        made: Any = defaultdict(list)
        made["x"] = torch.tensor(samples)
        return made

    placed = []

    def place(batch: Any) -> Any:
        placed.append(batch)
        return batch

    loader = prepare(DataLoader(range(4), batch_size=2, collate_fn=collate), place=place)
    batches = list(loader)
    assert all(got is sent for got, sent in zip(batches, placed, strict=True))
    assert batches[0].default_factory is list


def test_in_order_false_gives_way_on_several_ranks() -> None:
    source = DataLoader(range(8), batch_size=2, num_workers=1, in_order=False)
    with pytest.warns(UserWarning, match="in_order=False has no effect"):
        prepare(source, 0, 2)
    prepare(source)


def test_a_sampler_that_lies_about_its_length_is_reported() -> None:
    class Liar(Sampler):
        def __init__(self, said: int) -> None:
            self.said = said

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0], [1], [2])

        def __len__(self) -> int:
            return self.said

    for said, word in ((2, "more"), (4, "fewer")):
        with pytest.warns(UserWarning, match=f"Liar yielded {word} batches"):
            assert len(epoch(prepare(DataLoader(range(3), batch_sampler=Liar(said))))) == 3


# ---------------------------------------------------------------------------------------------------------- the gate


@attrs.define
class RecordingGate:
    """Writes down what it is told."""

    told: list[Any] = attrs.field(factory=list)

    def enter(self, loader: Any) -> str:
        self.told.append("enter")
        return "frame"

    def advance(self, frame: str, left: int | None) -> None:
        assert frame == "frame"
        self.told.append(left)

    def leave(self, frame: str) -> None:
        self.told.append("leave")


def test_the_gate_counts_down_a_sized_loader() -> None:
    gate = RecordingGate()
    list(prepare(DataLoader(range(10), batch_size=2), 0, 2, gate=gate))
    assert gate.told == ["enter", 3, 2, 1, "leave"]


def test_the_gate_learns_of_the_last_batch_of_an_unsized_sampler_before_it_is_handed_out() -> None:
    class Unsized(Sampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0], [1], [2])

    gate = RecordingGate()
    loader = prepare(DataLoader(range(3), batch_sampler=Unsized()), gate=gate)
    assert epoch(loader) == [[0], [1], [2]]
    assert gate.told == ["enter", None, None, 1, "leave"]
    with pytest.raises(TypeError):
        len(loader)


def test_leaving_the_loop_early_leaves_the_gate_and_is_not_the_end() -> None:
    gate = RecordingGate()
    loader = prepare(DataLoader(range(4), batch_size=2), gate=gate)
    for _ in loader:
        assert not loader.end_of_dataloader
        break
    gc.collect()
    assert gate.told == ["enter", 2, "leave"]
    for _ in loader:
        pass
    for _ in loader:
        if loader.end_of_dataloader:
            break
    assert not loader.end_of_dataloader


def test_the_end_is_known_exactly_while_the_last_batch_is_in_hand() -> None:
    loader = prepare(DataLoader(range(6), batch_size=2))
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert not loader.end_of_dataloader


def test_an_error_while_loading_leaves_the_gate() -> None:
    class Broken(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise RuntimeError("bad sample 3")
            return index

    gate = RecordingGate()
    with pytest.raises(RuntimeError, match="bad sample 3"):
        list(prepare(DataLoader(Broken(), batch_size=2), gate=gate))
    assert gate.told == ["enter", 2, "leave"]


def test_nothing_is_loaded_ahead_without_workers() -> None:
    loaded = []

    class Watched(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    iterator = iter(prepare(DataLoader(Watched(), batch_size=2), 1, 2))
    next(iterator)
    assert loaded == [2, 3]


def test_one_loader_can_be_iterated_twice_at_once() -> None:
    loader = prepare(DataLoader(range(6), batch_size=2, shuffle=True))
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
    assert all(one == other for one, other in pairs)
    assert loader.epoch == 1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("broken_off", [False, True])
def test_a_loader_goes_away_with_its_last_reference(broken_off: bool, workers: int) -> None:
    loader = prepare(DataLoader(range(12), batch_size=2, num_workers=workers))
    iterator = iter(loader)
    next(iterator)
    if not broken_off:
        list(iterator)
    inner = weakref.ref(loader._feed.inner)
    gc.disable()
    try:
        del loader, iterator
        assert inner() is None  # else kept workers are waited for, seconds each
    finally:
        gc.enable()


def test_evening_holds_for_a_block_and_ends_with_it() -> None:
    loader = prepare(DataLoader(range(7), batch_size=2), 1, 2)
    with loader.evening(False):
        assert epoch(loader) == [[2, 3], [6]]
    assert epoch(loader) == [[2, 3], [6, 0]]
    with pytest.raises(KeyError), loader.evening(False):
        raise KeyError
    assert [len(batch) for batch in epoch(loader)] == [2, 2]
