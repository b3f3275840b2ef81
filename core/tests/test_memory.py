"""Finding a batch size that fits, and what counts as running out of memory."""

from __future__ import annotations

import re
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import DrivetrainError
from drivetrain.memory import find_executable_batch_size, looks_out_of_memory, release_memory


def fits_at_most(limit: int, tried: list[int]):
    def train(batch_size: int, *further: object) -> tuple[int, tuple[object, ...]]:
        tried.append(batch_size)
        if batch_size > limit:
            raise RuntimeError("device: out of memory")
        return batch_size, further

    return train


def test_the_batch_size_is_halved_until_it_fits():
    tried: list[int] = []
    find = find_executable_batch_size(fits_at_most(20, tried))
    assert find("a", "b") == (16, ("a", "b"))
    assert tried == [128, 64, 32, 16]


def test_every_call_starts_anew():
    tried: list[int] = []
    find = find_executable_batch_size(fits_at_most(4, tried), starting_batch_size=8)
    assert [find()[0], find()[0]] == [4, 4]
    assert tried == [8, 4, 8, 4]


@pytest.mark.parametrize("reducer", [lambda: 10, lambda failed: failed - 118])
def test_a_reducer_of_ones_own_is_used(reducer):
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128, reduce_batch_size_fn=reducer)
    def train(batch_size: int) -> int:
        return fits_at_most(10, tried)(batch_size)[0]

    assert train() == 10
    assert tried == [128, 10]


def test_an_error_says_so_when_nothing_fits():
    with pytest.raises(DrivetrainError, match="from 4 down, and zero is reached"):
        find_executable_batch_size(fits_at_most(0, []), starting_batch_size=4)()


def test_each_try_that_failed_is_in_the_log_with_the_memory_in_use(
    fresh_run: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="drivetrain")
    find = find_executable_batch_size(fits_at_most(2, []), starting_batch_size=4)
    find()
    assert caplog.messages == ["train ran out of memory with batch size 4"]  # no run, no device
    Accelerator(cpu=True)
    caplog.clear()
    find()
    (message,) = caplog.messages
    assert re.fullmatch(r"train ran out of memory with batch size 4 \(cpu: [\d.]+ of [\d.]+ GiB in use\)", message)
    with pytest.raises(DrivetrainError, match=r"not even the smallest batch fits \(cpu: .* GiB in use\)"):
        find_executable_batch_size(fits_at_most(0, []), starting_batch_size=4)()


def test_other_errors_pass_through_at_once():
    tried: list[int] = []

    @find_executable_batch_size
    def broken(batch_size: int) -> None:
        tried.append(batch_size)
        raise ValueError("nothing to do with memory")

    with pytest.raises(ValueError, match="nothing to do with memory"):
        broken()
    assert tried == [128]


def test_the_batch_size_is_not_for_the_caller_to_give():
    def train(batch_size: int, lr: float) -> float:
        return lr

    find = find_executable_batch_size(train)
    assert find(0.1) == 0.1
    with pytest.raises(TypeError, match=r"call train\(lr\)"):
        find(64, 0.1)
    with pytest.raises(TypeError, match="the batch size, which is found for you"):
        find(0.1, batch_size=64)
    with pytest.raises(TypeError, match="the batch size"):
        find_executable_batch_size(lambda: None)()


def test_what_a_failed_try_allocated_is_gone_before_the_next():
    refs: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        alive.extend(ref() is not None for ref in refs)
        large = torch.empty(batch_size)
        cycle = [large]
        cycle.append(cycle)  # type: ignore[arg-type]
        refs.append(weakref.ref(large))
        if batch_size > 1:
            raise torch.OutOfMemoryError("no")

    train()
    assert alive == [False, False, False]


@pytest.mark.parametrize(
    ("error", "meant"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_a_lack_of_memory(error, meant):
    assert looks_out_of_memory(error) is meant


def test_release_memory_gives_a_none_for_each_object():
    class Thing:
        pass

    one, other = Thing(), Thing()
    refs = weakref.ref(one), weakref.ref(other)
    one, other = release_memory(one, other)
    assert (one, other) == (None, None)
    assert [ref() for ref in refs] == [None, None]


def test_plugins_are_told_what_is_let_go(open_site: Any, fresh_run: None) -> None:
    open_site.install_backend("keeper", "told = []\n@hookimpl\ndef release(self, models): self.told.append(models)")
    accelerator = Accelerator(cpu=True, backend="keeper")
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.free_memory()
    accelerator.free_memory()
    told = sys.modules["fake_backend_keeper"].Plug.told
    assert told == [[model], []]
    assert accelerator.prepare(model) is model
