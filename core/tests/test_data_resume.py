"""Resuming in the middle of an epoch, and skipping its first batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from core.tests.loaders import epoch, prepare
from drivetrain.data.skipping import skip_first_batches


def source(n: int = 16, workers: int = 0, **options: Any) -> DataLoader:
    options.setdefault("batch_size", 2)
    return DataLoader(range(n), num_workers=workers, **options)


@pytest.mark.parametrize("call_skip", [False, True])
@pytest.mark.parametrize("save_epoch", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rest_of_an_epoch_and_all_later_ones_are_those_of_the_unbroken_run(
    ranks: int, save_epoch: int, call_skip: bool
) -> None:
    unbroken = prepare(source(shuffle=True), ranks - 1, ranks)
    expected = [epoch(unbroken) for _ in range(3)]
    loader = prepare(source(shuffle=True), ranks - 1, ranks)
    for _ in range(save_epoch):
        epoch(loader)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    fresh = prepare(source(shuffle=True), ranks - 1, ranks, base_seed=99)  # a new process has another seed
    fresh.load_state_dict(state)
    active = skip_first_batches(fresh, 3) if call_skip else fresh
    assert epoch(active) == expected[save_epoch][3:]
    assert [epoch(fresh) for _ in range(save_epoch + 1, 3)] == expected[save_epoch + 1 :]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_position_is_what_the_user_was_given_whatever_was_read_ahead(workers: int) -> None:
    loader = prepare(source(20, workers))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    del iterator
    fresh = prepare(source(20, workers))
    fresh.load_state_dict(state)
    assert next(iter(fresh)).tolist() == [6, 7]
    assert epoch(fresh)[0] == [6, 7]


def test_two_ranks_go_on_without_repeats() -> None:
    for rank, first in ((0, [8, 9]), (1, [10, 11])):
        loader = prepare(source(40), rank, 2)
        iterator = iter(loader)
        seen = [next(iterator).tolist() for _ in range(2)]
        fresh = prepare(source(40), rank, 2)
        fresh.load_state_dict(loader.state_dict())
        rest = epoch(fresh)
        assert rest[0] == first
        assert len({index for batch in seen + rest for index in batch}) == 20


@pytest.mark.parametrize("workers", [0, 2])
def test_saved_with_the_last_batch_in_hand_the_next_pass_is_a_whole_epoch(workers: int) -> None:
    loader = prepare(source(6, workers, shuffle=True))
    states = [loader.state_dict() for _ in loader]
    second = epoch(loader)
    fresh = prepare(source(6, workers, shuffle=True))
    fresh.load_state_dict(states[-1])
    assert epoch(fresh) == second
    after = prepare(source(6, workers, shuffle=True))
    after.load_state_dict({**states[-1], "epoch": 0, "position": 3})
    assert epoch(after) == second


def test_a_state_saved_after_leaving_the_loop_early_goes_on_there() -> None:
    loader = prepare(source(shuffle=True))
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 3:
            break
    fresh = prepare(source(shuffle=True))
    fresh.load_state_dict(loader.state_dict())
    whole = prepare(source(shuffle=True))
    assert seen + epoch(fresh) == epoch(whole)


def left_after_three() -> Any:
    loader = prepare(source(shuffle=True))
    for step, _ in enumerate(loader):
        if step == 2:
            break
    return loader


def test_a_process_that_leaves_the_loop_early_can_begin_the_next_epoch_as_one_that_loads_does() -> None:
    loader = left_after_three()
    assert loader.left_at == 3
    loader.set_epoch(loader.epoch + 1)
    assert loader.left_at is None
    fresh = prepare(source(shuffle=True))
    fresh.load_state_dict(loader.state_dict())
    following = epoch(loader)
    assert len(following) == len(loader)
    assert epoch(fresh) == following


def test_a_process_that_leaves_the_loop_early_can_finish_the_epoch_as_one_that_loads_does() -> None:
    loader = left_after_three()
    fresh = prepare(source(shuffle=True))
    fresh.load_state_dict(loader.state_dict())
    assert epoch(skip_first_batches(loader, loader.left_at)) == epoch(fresh)
    assert epoch(loader) == epoch(fresh)


def test_a_resumed_pass_can_be_saved_and_resumed_again() -> None:
    state = {**prepare(source(12)).state_dict(), "position": 2}
    for first in (4, 6, 8):
        loader = prepare(source(12))
        loader.load_state_dict(state)
        iterator = iter(loader)
        assert next(iterator).tolist() == [first, first + 1]
        state = loader.state_dict()
        iterator.close()


def test_setting_the_epoch_one_is_in_keeps_the_position_and_another_clears_it() -> None:
    loader = prepare(source(8))
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "position": 3})
    loader.set_epoch(2)
    assert epoch(loader) == [[6, 7]]
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "position": 3})
    loader.set_epoch(3)
    assert len(epoch(loader)) == 4


def test_looking_at_a_batch_of_a_resumed_loader_does_not_lose_the_position() -> None:
    loader = prepare(source(8))
    loader.load_state_dict({**loader.state_dict(), "position": 2})
    assert next(iter(loader)).tolist() == [4, 5]
    assert epoch(loader) == [[4, 5], [6, 7]]


def test_another_number_of_ranks_goes_on_at_the_same_sample() -> None:
    state = {**prepare(source(24), 0, 2).state_dict(), "position": 4}  # 16 samples
    seen: list[int] = []
    for rank in range(4):
        loader = prepare(source(24), rank, 4)
        loader.load_state_dict(state)
        seen += [index for batch in epoch(loader) for index in batch]
    assert sorted(seen) == list(range(16, 24))


def test_a_position_inside_a_round_of_other_ranks_is_refused_with_the_numbers() -> None:
    state = {**prepare(source(24), 0, 2).state_dict(), "position": 1}
    with pytest.raises(ValueError, match=r"after 4 samples .* multiple of the 8"):
        prepare(source(24), 0, 4).load_state_dict(state)


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    loader = prepare(source(8))
    good = loader.state_dict()
    with pytest.raises(ValueError, match="lacks seed"):
        loader.load_state_dict({key: value for key, value in good.items() if key != "seed"})
    with pytest.raises(ValueError, match="reads other data"):
        loader.load_state_dict({**good, "position": 9})
    with pytest.raises(ValueError, match="saved in batches"):
        loader.load_state_dict({**good, "position": 1, "unit": "batches"})
    assert loader.state_dict() == good


def test_batches_of_varying_size_count_in_batches() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6]]
    loader = prepare(DataLoader(range(7), batch_sampler=batches), 1, 2)
    iterator = iter(loader)
    next(iterator)
    fresh = prepare(DataLoader(range(7), batch_sampler=batches), 1, 2)
    fresh.load_state_dict(loader.state_dict())
    assert epoch(fresh) == [[6]]


def test_kept_workers_serve_every_epoch() -> None:
    class WorkerIds(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            import os

            return torch.tensor([index, os.getpid()])

    loader = prepare(DataLoader(WorkerIds(), batch_size=2, num_workers=1, persistent_workers=True, shuffle=True))
    passes = [torch.cat(list(loader)) for _ in range(3)]
    assert len({int(pid) for one in passes for pid in one[:, 1]}) == 1
    assert len({tuple(one[:, 0].tolist()) for one in passes}) == 3
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 2})
    assert torch.equal(torch.cat(list(loader)), passes[1][4:])


def test_a_loader_that_was_iterated_before_it_was_prepared_keeps_its_workers_to_itself() -> None:
    plain = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    assert len(epoch(plain)) == 4
    assert epoch(prepare(plain, 1, 2)) == [[2, 3], [6, 7]]
    assert len(epoch(plain)) == 4


# ----------------------------------------------------------------------------------------------------------- skipping


def test_skipping_concerns_the_first_pass_only() -> None:
    loader = prepare(source(6))
    skipped = skip_first_batches(loader, 1)
    assert len(skipped) == 2
    assert epoch(skipped) == [[2, 3], [4, 5]]
    assert len(skipped) == 3
    assert len(epoch(skipped)) == 3
    assert len(epoch(loader)) == 3


def test_the_original_goes_on_with_the_next_epoch_after_the_skipped_pass() -> None:
    whole = prepare(source(shuffle=True))
    expected = [epoch(whole), epoch(whole)]
    loader = prepare(source(shuffle=True))
    skipped = skip_first_batches(loader, 2)
    assert epoch(skipped) == expected[0][2:]
    assert epoch(loader) == expected[1]


def test_a_skipped_copy_has_the_settings_and_class_of_its_source() -> None:
    loader = prepare(source(14, batch_size=5, drop_last=True), even_batches=False)
    skipped = skip_first_batches(loader, 1)
    assert type(skipped) is type(loader)
    assert epoch(skipped) == [[5, 6, 7, 8, 9]]
    for name in ("batch_size", "total_batch_size", "drop_last", "num_workers", "collate_fn", "dataset", "remainder"):
        assert getattr(skipped, name) == getattr(loader, name)


def test_metrics_are_exact_after_skipping() -> None:
    loaders = [skip_first_batches(prepare(source(11), rank, 2), 1) for rank in range(2)]
    found: list[int] = []
    for pair in zip(*loaders, strict=True):
        found += loaders[0].rows.trim(torch.cat(pair), len(pair[0])).tolist()
    assert found == list(range(4, 11))


def test_skipping_keeps_the_epoch() -> None:
    loader = prepare(source(shuffle=True))
    loader.set_epoch(1)
    whole = prepare(source(shuffle=True))
    whole.set_epoch(1)
    assert epoch(skip_first_batches(loader, 2)) == epoch(whole)[2:]


def test_continuing_in_the_same_process_after_leaving_the_loop() -> None:
    whole = epoch(prepare(source(shuffle=True)))
    loader = prepare(source(shuffle=True))
    for step, _ in enumerate(loader):
        if step == 2:
            break
    assert epoch(skip_first_batches(loader, 3)) == whole[3:]


def test_skipped_samples_are_not_loaded() -> None:
    loaded = []

    class Watched(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    list(skip_first_batches(prepare(DataLoader(Watched(), batch_size=2)), 3))
    list(skip_first_batches(DataLoader(Watched(), batch_size=2), 3))
    assert loaded == [6, 7, 6, 7]


def test_the_gate_counts_what_is_left_after_skipping() -> None:
    told = []

    class Gate:
        def enter(self, loader: Any) -> None: ...
        def leave(self, frame: None) -> None: ...
        def advance(self, frame: None, left: int | None) -> None:
            told.append(left)

    list(skip_first_batches(prepare(source(8), gate=Gate()), 2))
    assert told == [2, 1]


def test_a_plain_loader_skips_once_and_keeps_its_class_and_settings() -> None:
    class Mine(DataLoader):
        pass

    plain = Mine(range(6), batch_size=2, timeout=0)
    skipped = skip_first_batches(plain, 1)
    assert type(skipped) is Mine
    assert (len(skipped), skipped.batch_size) == (2, 2)
    assert epoch(skipped) == [[2, 3], [4, 5]]
    assert len(epoch(skipped)) == 3
    assert len(epoch(plain)) == 3
    torch.manual_seed(0)
    expected = epoch(DataLoader(range(6), batch_size=2, shuffle=True))
    torch.manual_seed(0)
    assert epoch(skip_first_batches(DataLoader(range(6), batch_size=2, shuffle=True), 1)) == expected[1:]


def test_a_plain_stream_and_a_plain_unbatched_loader_skip_too() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)

    skipped = skip_first_batches(DataLoader(Stream(), batch_size=2), 2)
    assert [epoch(skipped), len(epoch(skipped))] == [[[4, 5]], 3]
    assert [int(item) for item in skip_first_batches(DataLoader(range(4), batch_size=None), 2)] == [2, 3]


def test_a_skipped_plain_loader_can_be_prepared() -> None:
    skipped = skip_first_batches(source(12), 2)
    assert epoch(prepare(skipped, 1, 2)) == [[6, 7], [10, 11]]


def test_what_cannot_be_skipped_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        skip_first_batches(prepare(source()), -1)
    with pytest.raises(TypeError, match="not list"):
        skip_first_batches([1], 1)
