"""Loaders whose position is asked for: by setting, and those of torchdata that keep one themselves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from core.tests.loaders import epoch, prepare
from drivetrain import Accelerator, DataLoaderConfiguration, state


def resumed(directory: Path, make: Any) -> tuple[list[list[int]], list[list[int]]]:
    """An epoch of which three batches were had when the state was saved, and what a new process gets of it."""
    state.reset()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(make())
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        if len(whole) == 3:
            accelerator.save_state(directory)
    state.reset()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    assert accelerator.use_stateful_dataloader
    loader = accelerator.prepare(make())
    accelerator.load_state(directory)
    return whole, epoch(loader)


@pytest.mark.usefixtures("fresh_run", "no_fsync")
def test_a_stateful_loader_is_what_every_prepared_one_is(tmp_path: Path) -> None:
    whole, rest = resumed(tmp_path / "c", lambda: DataLoader(range(12), batch_size=2, shuffle=True))
    assert rest == whole[3:]


@pytest.mark.usefixtures("fresh_run", "no_fsync")
def test_a_loader_of_torchdata_goes_on_where_it_was(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    whole, rest = resumed(tmp_path / "c", lambda: torchdata.StatefulDataLoader(range(12), batch_size=2, shuffle=True))
    assert rest == whole[3:]


@pytest.mark.filterwarnings("ignore:StatefulDataLoader has its own way of iterating")
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_loaders_of_torchdata_are_shared_out_and_resumed(ranks: int, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def made(rank: int) -> Any:
        generator = torch.Generator().manual_seed(3)
        source = torchdata.StatefulDataLoader(
            range(20), batch_size=2, shuffle=True, num_workers=workers, generator=generator
        )
        return prepare(source, rank, ranks)

    wholes = []
    for rank in range(ranks):
        loader = made(rank)
        iterator = iter(loader)
        first = [batch.tolist() for batch in itertools.islice(iterator, 2)]
        saved = loader.state_dict()
        wholes.append(first + [batch.tolist() for batch in iterator])
        following = epoch(loader)
        fresh = made(rank)
        fresh.load_state_dict(saved)
        assert epoch(fresh) == wholes[-1][2:]
        assert epoch(fresh) == following
    assert sorted(sample for whole in wholes for batch in whole for sample in batch) == list(range(20))


class Counting(IterableDataset[int]):
    """Remembers how far it is, as torchdata wants streams to."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_with_a_state_of_its_own_goes_on_where_it_was() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = prepare(torchdata.StatefulDataLoader(Counting(), batch_size=2))
    list(itertools.islice(iter(loader), 3))
    fresh = prepare(torchdata.StatefulDataLoader(Counting(), batch_size=2))
    fresh.load_state_dict(loader.state_dict())
    assert epoch(fresh) == [[6, 7], [8, 9]]
    assert epoch(fresh) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.usefixtures("fresh_run", "no_fsync")
def test_saving_after_a_loop_was_left_early_says_who_goes_on_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
    logging.getLogger("drivetrain").propagate = True
    with caplog.at_level("INFO", logger="drivetrain"):
        for step, _ in enumerate(loader):
            if step == 2:
                accelerator.save_state(tmp_path / "inside")
                break
        assert "was left" not in caplog.text
        accelerator.save_state(tmp_path / "after")
        said = [record.getMessage() for record in caplog.records if "was left" in record.getMessage()]
        epoch(loader)
        accelerator.save_state(tmp_path / "later")
    assert len([record for record in caplog.records if "was left" in record.getMessage()]) == len(said) == 1
    assert "loader 0 was left after 3 batches of epoch 0, and is saved there" in said[0]
    assert "the next loop here begins epoch 1. loader.set_epoch(1) before saving" in said[0]
