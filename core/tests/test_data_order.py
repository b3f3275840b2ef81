"""The order of an epoch and what is drawn while loading."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

from core.tests.loaders import prepare, samples
from drivetrain.data.randomness import Isolation, derive_seed


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Drawing(Sampler):
    """A sampler of the user's that shuffles with a global generator."""

    def __init__(self, kind: str, lazily: bool) -> None:
        self.kind = kind
        self.lazily = lazily

    def _draw(self) -> float:
        if self.kind == "torch":
            return float(torch.rand(()))
        return random.random() if self.kind == "python" else float(np.random.rand())

    def __iter__(self) -> Iterator[int]:
        if not self.lazily:
            return iter(sorted(range(12), key=lambda _: self._draw()))
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[int]:
        rest = list(range(12))
        while rest:
            yield rest.pop(int(self._draw() * len(rest)))

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_sampler_that_draws_from_global_generators_agrees_between_ranks(kind: str, lazily: bool) -> None:
    seen = []
    for rank in range(2):
        seed_everything(rank)  # ranks seeded apart, as without set_seed
        seen += samples(prepare(DataLoader(range(12), batch_size=2, sampler=Drawing(kind, lazily)), rank, 2))
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_global_generators_are_left_as_they_were(kind: str, lazily: bool) -> None:
    def draws() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.randn())]

    seed_everything(3)
    expected = draws() + draws()
    seed_everything(3)
    found = draws()
    samples(prepare(DataLoader(range(12), batch_size=2, sampler=Drawing(kind, lazily)), 0, 2))
    samples(prepare(DataLoader(range(12), batch_size=2, shuffle=True), 0, 2))
    assert found + draws() == expected


def test_order_is_a_function_of_seed_and_epoch() -> None:
    source = DataLoader(range(24), batch_size=8, shuffle=True)
    loader = prepare(source, base_seed=42)
    loader.set_epoch(1)
    once = samples(loader)
    loader.set_epoch(1)
    assert samples(loader) == once
    loader.set_epoch(0)
    assert samples(loader) != once
    fresh = prepare(DataLoader(range(24), batch_size=8, shuffle=True), base_seed=42)
    fresh.set_epoch(1)
    assert samples(fresh) == once
    other = prepare(DataLoader(range(24), batch_size=8, shuffle=True), base_seed=43)
    other.set_epoch(1)
    assert samples(other) != once


def test_epochs_move_on_by_themselves_and_differ() -> None:
    loader = prepare(DataLoader(range(24), batch_size=8, shuffle=True))
    orders = [samples(loader) for _ in range(3)]
    assert loader.epoch == loader.iteration == 3
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(24)) for order in orders)


def test_a_loop_that_stops_each_epoch_early_sees_another_order_each_time() -> None:
    loader = prepare(DataLoader(range(100), batch_size=2, shuffle=True))
    firsts = []
    for _ in range(3):
        for step, batch in enumerate(loader):
            if step == 0:
                firsts.append(tuple(batch.tolist()))
            if step == 2:
                break
    assert len(set(firsts)) == 3


def test_looking_at_one_batch_does_not_move_the_order() -> None:
    looked = prepare(DataLoader(range(24), batch_size=2, shuffle=True))
    first = next(iter(looked)).tolist()
    order = samples(looked)
    assert order[:2] == first
    assert order == samples(prepare(DataLoader(range(24), batch_size=2, shuffle=True)))


@pytest.mark.parametrize("where", ["loader", "sampler"])
def test_a_generator_the_user_seeded_decides_the_order(where: str) -> None:
    def source(seed: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        if where == "loader":
            return DataLoader(range(24), batch_size=4, shuffle=True, generator=generator)
        return DataLoader(range(24), batch_size=4, sampler=SubsetRandomSampler(range(24), generator=generator))

    assert samples(prepare(source(5), base_seed=1)) == samples(prepare(source(5), base_seed=2))
    assert samples(prepare(source(5))) != samples(prepare(source(6)))
    assert samples(prepare(source(5), data_seed=9)) == samples(prepare(source(6), data_seed=9))


class FirstRank:
    """Every rank hears what rank 0 said."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        return 100


def test_generators_seeded_by_rank_still_give_disjoint_shards() -> None:
    seen = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(100 + rank)
        source = DataLoader(range(24), batch_size=4, shuffle=True, generator=generator)
        seen += samples(prepare(source, rank, 2, collectives=FirstRank()))
    assert sorted(seen) == list(range(24))


class Private(Sampler):
    """A sampler of the user's that shuffles with a generator of its own, which nobody seeded."""

    def __init__(self, kind: str) -> None:
        if kind == "torch":
            self.rng: Any = torch.Generator()
            self.rng.seed()
        else:
            self.rng = {"python": random.Random, "numpy": np.random.default_rng, "old numpy": np.random.RandomState}[
                kind
            ]()

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(24, generator=self.rng).tolist())
        order = list(range(24))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "old numpy"])
def test_a_sampler_with_a_generator_of_its_own_agrees_between_ranks_and_runs(kind: str) -> None:
    def make(rank: int) -> Any:
        return prepare(DataLoader(range(24), batch_size=4, sampler=Private(kind)), rank, 2, collectives=FirstRank())

    loaders = [make(rank) for rank in range(2)]
    orders = [samples(loaders[0]) + samples(loaders[1]) for _ in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(24))
    assert orders[0] != orders[1]
    resumed = make(0)
    resumed.load_state_dict({**resumed.state_dict(), "position": 1})
    assert samples(resumed) == orders[0][4:12]


def test_what_shares_a_samplers_generator_does_not_notice() -> None:
    sampler = Private("python")
    shared, before = sampler.rng, sampler.rng.getstate()
    samples(prepare(DataLoader(range(24), batch_size=4, sampler=sampler)))
    assert shared.getstate() == before


def test_loaders_that_share_a_generator_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(5)

    def source() -> DataLoader:
        return DataLoader(
            range(64), batch_size=4, sampler=RandomSampler(range(64), replacement=True, generator=generator)
        )

    alone = samples(prepare(source()))
    one, other = prepare(source()), prepare(source())
    together = []
    for batch, _ in zip(one, other, strict=True):
        together += batch.tolist()
    assert together == alone


def test_samplers_and_datasets_are_told_the_epoch() -> None:
    class Told(Dataset):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    loader = prepare(DataLoader(Told(), batch_size=2))
    samples(loader)
    samples(loader)
    loader.set_epoch(5)
    assert Told.epochs == [0, 1, 5]


def test_an_epoch_set_on_the_sampler_itself_is_taken_over() -> None:
    def source() -> DataLoader:
        return DataLoader(range(16), batch_size=2, sampler=DistributedSampler(range(16), num_replicas=1, rank=0))

    loader, other = prepare(source()), prepare(source())
    loader.sampler.set_epoch(3)
    other.set_epoch(3)
    assert samples(loader) == samples(other)
    assert loader.epoch == 4


# --------------------------------------------------------------------------------------------------- while loading


class Augmented(Dataset):
    """Each item is its index and a number drawn while loading it."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item() + random.random() + np.random.rand()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_agree_and_augmentations_differ_between_ranks_and_epochs(workers: int) -> None:
    drawn: list[list[float]] = []
    indices: list[int] = []
    for rank in range(2):
        seed_everything(5)  # the same on all ranks, as set_seed does
        loader = prepare(DataLoader(Augmented(), batch_size=2, num_workers=workers), rank, 2)
        first, second = torch.cat(list(loader)), torch.cat(list(loader))
        indices += first[:, 0].long().tolist()
        drawn += [first[:, 1].tolist(), second[:, 1].tolist()]
    assert set(indices) == set(range(22))
    assert len({value for values in drawn for value in values}) == sum(map(len, drawn))


@pytest.mark.parametrize(("ranks", "before", "after"), [(2, 0, 0), (2, 2, 1), (2, 0, 2), (1, 1, 2)])
def test_augmentations_of_a_resumed_epoch_are_those_of_the_unbroken_one(ranks: int, before: int, after: int) -> None:
    whole = prepare(DataLoader(Augmented(), batch_size=2, num_workers=before), ranks - 1, ranks)
    expected = torch.cat(list(whole))
    resumed = prepare(DataLoader(Augmented(), batch_size=2, num_workers=after), ranks - 1, ranks)
    resumed.load_state_dict({**resumed.state_dict(), "position": 2})
    random.seed(99)
    assert torch.equal(torch.cat(list(resumed)), expected[4:])


class Keyed(Augmented):
    """Fetches several items at once, and draws from a generator that the user seeds in each worker."""

    started = 0

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return [torch.tensor([index, self.started, torch.rand(()).item()]) for index in indices]


def start(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.started = worker + 1


def test_workers_start_as_the_user_says_and_see_the_users_dataset() -> None:
    given = DataLoader(Keyed(), batch_size=2, num_workers=2, worker_init_fn=start)
    loader = prepare(given)
    batches = list(loader)
    assert [batch[0, 1].item() for batch in batches[:4]] == [1, 2, 1, 2]
    assert loader.dataset is given.dataset
    assert isinstance(given.dataset, Keyed)
    assert loader.worker_init_fn is start


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_that_are_not_batched_are_drawn_by_position_too(workers: int) -> None:
    whole = prepare(DataLoader(Augmented(), batch_size=None, num_workers=1))
    expected = torch.stack(list(whole))
    resumed = prepare(DataLoader(Augmented(), batch_size=None, num_workers=workers))
    resumed.load_state_dict({**resumed.state_dict(), "position": 5})
    assert torch.equal(torch.stack(list(resumed)), expected[5:])


def test_one_process_draws_from_the_global_generator_as_an_unprepared_loader_does() -> None:
    torch.manual_seed(0)
    expected = [float(torch.rand(())) for _ in range(4)]

    class Rand(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(torch.rand(()))

    torch.manual_seed(0)
    found = [value for batch in prepare(DataLoader(Rand(), batch_size=2)) for value in batch.tolist()]
    assert found == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------- building


def test_isolation_goes_on_where_it_left_off_and_leaves_no_trace() -> None:
    seed_everything(1)
    apart = Isolation(11)
    inside = [apart.call(random.random) for _ in range(3)]
    again = Isolation(11)
    assert [again.call(random.random) for _ in range(3)] == inside
    assert len(set(inside)) == 3
    found = random.random()
    random.seed(1)
    assert found == random.random()


def test_isolation_is_idle_for_what_draws_nothing() -> None:
    apart = Isolation()
    assert not apart.idle
    assert apart.call(len, [1, 2]) == 2
    assert apart.idle


def test_isolation_puts_generators_back_after_an_error() -> None:
    def fails() -> None:
        torch.rand(3)
        raise KeyError("no")

    before = torch.get_rng_state()
    apart = Isolation()
    for _ in range(2):
        with pytest.raises(KeyError):
            apart.call(fails)
        assert torch.equal(torch.get_rng_state(), before)


def test_derived_seeds_fit_every_generator_and_differ() -> None:
    seeds = {derive_seed(seed, part, rank) for seed in range(5) for part in ("order", "items") for rank in range(5)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_users_sampler_is_asked_for_one_round_at_a_time() -> None:
    asked: list[int] = []

    class Curriculum(Sampler):
        """Decides what comes next by what happened in the steps before."""

        def __iter__(self) -> Iterator[int]:
            for index in range(12):
                asked.append(index)
                yield index

        def __len__(self) -> int:
            return 12

    batches = iter(prepare(DataLoader(range(12), batch_size=2, sampler=Curriculum()), 0, 2))
    next(batches)
    assert asked == [0, 1, 2, 3]
    next(batches)
    assert len(asked) == 8
