"""The gate: which micro-batch ends a group, and what its losses are divided by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.accumulation import Accumulation, Block, GradientAccumulationPlugin
from drivetrain.errors import DrivetrainError


class Loader:
    """Reports to the gate as a prepared loader does."""

    def __init__(self, gate: Accumulation, length: int, sized: bool = True) -> None:
        self.gate, self.length, self.sized = gate, length, sized

    def __iter__(self) -> Iterator[int]:
        frame = self.gate.enter(self)
        try:
            for index in range(self.length):
                left = self.length - index
                self.gate.advance(frame, left if self.sized or left == 1 else None)
                yield index
        finally:
            self.gate.leave(frame)


@pytest.fixture
def entered() -> list[bool]:
    return []


def gate(steps: int, entered: list[bool] | None = None, **choices: object) -> Accumulation:
    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        if entered is not None:
            entered.append(last)
        yield

    return Accumulation(steps, GradientAccumulationPlugin(**choices), context)


def walk(
    one: Accumulation, loader: Loader, models: tuple[nn.Module, ...] | None = None
) -> list[tuple[bool, int, float]]:
    """(sync, size, rescale) of every micro-batch, in a plain loop or in blocks."""
    seen = []
    for _ in loader:
        with Block(one, models) if models is not None else contextlib.nullcontext():
            seen.append((one.frame.sync, one.frame.size, one.frame.rescale))
    return seen


@pytest.mark.parametrize("models", [None, (), (nn.Linear(1, 1),)], ids=["plain", "block", "block naming a model"])
def test_five_batches_in_groups_of_two_end_with_a_group_of_one(models: tuple[nn.Module, ...] | None) -> None:
    one = gate(2)
    seen = walk(one, Loader(one, 5), models)
    assert seen == [(False, 2, 1.0), (True, 2, 1.0), (False, 2, 1.0), (True, 2, 1.0), (True, 1, 1.0)]


def test_a_stream_learns_of_its_end_late_and_asks_for_a_rescale() -> None:
    one = gate(4)
    assert walk(one, Loader(one, 6, sized=False)) == [
        *[(False, 4, 1.0)] * 3,
        (True, 4, 1.0),
        (False, 4, 1.0),
        (True, 4, 2.0),
    ]


def test_a_fixed_short_group_is_divided_by_the_full_number() -> None:
    one = gate(4, short_group="fixed")
    assert walk(one, Loader(one, 5))[-1] == (True, 4, 1.0)


@given(steps=st.integers(1, 7), length=st.integers(1, 30), sized=st.booleans(), block=st.booleans())
def test_each_batch_weighs_one_over_the_size_of_its_group(steps: int, length: int, sized: bool, block: bool) -> None:
    one = gate(steps)
    seen = walk(one, Loader(one, length, sized), () if block else None)
    groups: list[list[tuple[bool, int, float]]] = [[]]
    for micro in seen:
        groups[-1].append(micro)
        if micro[0]:
            groups.append([])
    assert groups.pop() == [], "the last batch must end a group"
    assert [len(group) for group in groups] == [
        *[steps] * (length // steps),
        *([length % steps] if length % steps else []),
    ]
    for group in groups:
        rescale = group[-1][2]
        assert [rescale / size for _, size, _ in group] == pytest.approx([1 / len(group)] * len(group))


def test_without_the_loaders_end_groups_run_on_across_epochs() -> None:
    one = gate(3, sync_with_dataloader=False)
    loader = Loader(one, 4)
    syncs = [sync for _ in range(3) for sync, _, _ in walk(one, loader)]
    assert syncs == [False, False, True] * 4


def test_microbatching_inside_a_batch_counts_blocks_when_the_loaders_end_is_off() -> None:
    one = gate(4, sync_with_dataloader=False)
    syncs = []
    for _ in Loader(one, 2):
        for _ in range(4):
            with Block(one, ()):
                syncs.append(one.frame.sync)
    assert syncs == [False, False, False, True] * 2


def test_blocks_that_name_different_models_count_apart() -> None:
    one = gate(2)
    generator, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    syncs: dict[str, list[bool]] = {"critic": [], "generator": []}
    for _ in Loader(one, 4):
        for name, model in (("critic", critic), ("generator", generator)):
            with Block(one, (model,)):
                syncs[name].append(one.frame.sync)
    assert syncs == {"critic": [False, True] * 2, "generator": [False, True] * 2}


def test_the_order_in_which_blocks_name_models_does_not_tell_their_groups_apart() -> None:
    one = gate(2)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    syncs = []
    for index in Loader(one, 4):
        with Block(one, (first, second) if index % 2 else (second, first)):
            syncs.append(one.frame.sync)
    assert syncs == [False, True] * 2


@pytest.mark.parametrize("looped", [True, False], ids=["in a loader", "without a loader"])
def test_a_block_inside_of_a_block_is_the_same_micro_batch(looped: bool, entered: list[bool]) -> None:
    one, model = gate(3, entered), nn.Linear(1, 1)
    inner = Block(one, (model,))  # a decorator is entered again and again
    seen = []
    for _ in Loader(one, 6) if looped else range(6):
        with Block(one, (model,)):
            with inner, inner:
                assert one.named == (model,)
            seen.append((one.frame.sync, one.frame.size))
            assert one.named == (model,)
    assert seen == [(False, 3), (False, 3), (True, 3)] * 2
    assert (one.blocks, one.named) == ([], ())


def test_a_block_around_a_loop_leaves_the_loops_blocks_their_own_micro_batches() -> None:
    one, model = gate(2), nn.Linear(1, 1)
    with Block(one, (model,)):
        seen = walk(one, Loader(one, 4), (nn.Linear(1, 1),))
    assert [sync for sync, _, _ in seen] == [False, True] * 2


def test_blocks_of_different_models_inside_of_each_other_are_refused() -> None:
    one, model = gate(2), nn.Linear(1, 1)
    message = "accumulate for Linear was entered inside of accumulate for all models"
    with pytest.raises(DrivetrainError, match=message), Block(one, ()), Block(one, (model,)):
        pass
    assert (one.blocks, one.named) == ([], ())
    one.set_steps(1)
    with Block(one, ()), Block(one, (model,)):  # nothing is counted
        assert one.named == (model,)


def test_an_evaluation_loop_inside_a_micro_batch_leaves_the_group_alone() -> None:
    one = gate(2)
    evaluation = Loader(one, 3)
    seen = []
    for _ in Loader(one, 5):
        before = (one.frame.sync, one.frame.size)
        for _ in evaluation:
            pass
        seen.append((one.frame.sync, one.frame.size))
        assert seen[-1] == before
    assert [sync for sync, _ in seen] == [False, True, False, True, True]


def test_an_iterator_left_lying_around_does_not_keep_the_gate() -> None:
    one = gate(2)
    peek = iter(Loader(one, 10))
    next(peek)
    assert [sync for sync, _, _ in walk(one, Loader(one, 4))] == [False, True, False, True]


def test_leaving_a_loop_early_opens_the_gate_and_the_next_pass_finishes_the_group() -> None:
    one = gate(2)
    loader = Loader(one, 5)
    for _ in loader:
        break
    assert one.frame.sync
    assert one.loaders == []
    assert [sync for sync, _, _ in walk(one, loader)] == [True, False, True, False, True]


def test_outside_any_loader_every_backward_is_a_group_of_its_own() -> None:
    one = gate(4)
    assert (one.frame.sync, one.frame.size) == (True, 1)


def test_blocks_without_a_loader_count_to_the_full_number() -> None:
    one = gate(3)
    syncs = []
    for _ in range(7):
        with Block(one, ()):
            syncs.append(one.frame.sync)
    assert syncs == [False, False, True, False, False, True, False]


def test_the_plain_loop_opens_the_backends_context_once_for_all_but_the_last(entered: list[bool]) -> None:
    one = gate(3, entered)
    walk(one, Loader(one, 7))
    assert entered == [False, False]  # the third group is its last micro-batch alone


def test_a_block_replaces_the_context_of_the_plain_loop() -> None:
    open_now: list[bool] = []
    deepest = 0

    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        nonlocal deepest
        open_now.append(last)
        deepest = max(deepest, len(open_now))
        yield
        open_now.pop()

    one = Accumulation(2, GradientAccumulationPlugin(), context)
    for _ in Loader(one, 4):
        with Block(one, ()):
            assert open_now == [one.frame.sync]
        for _ in Loader(one, 3):
            pass
    assert open_now == []
    assert deepest == 1


def test_the_backends_context_is_opened_anew_for_a_model_that_is_prepared_within_a_group(entered: list[bool]) -> None:
    one = gate(3, entered)
    one.renew()
    for index in Loader(one, 3):
        if index != 1:
            one.renew()
    assert entered == [False, False]


def test_groups_that_become_shorter_in_a_loop_leave_the_backends_context() -> None:
    open_now = 0

    @contextlib.contextmanager
    def context(last: bool) -> Iterator[None]:
        nonlocal open_now
        open_now += 1
        yield
        open_now -= 1

    one = Accumulation(4, GradientAccumulationPlugin(), context)
    seen = []
    for index in Loader(one, 4):
        seen.append((open_now, one.frame.sync))
        if index == 1:
            one.set_steps(1)
            seen.append((open_now, one.frame.sync))
    assert seen == [(1, False), (1, False), (0, False), (0, True), (0, True)]


def test_groups_of_one_never_open_a_context(entered: list[bool]) -> None:
    one = gate(1, entered)
    walk(one, Loader(one, 3))
    walk(one, Loader(one, 3), ())
    assert entered == []


def test_sync_each_batch_reduces_on_every_micro_batch(entered: list[bool]) -> None:
    one = gate(2, entered, sync_each_batch=True)
    assert [sync for sync, _, _ in walk(one, Loader(one, 4), ())] == [False, True, False, True]
    assert entered == [True] * 4


@pytest.mark.parametrize("choices", [{"num_steps": 0}, {"num_steps": 1.5}, {"short_group": "median"}])
def test_impossible_choices_are_refused(choices: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        GradientAccumulationPlugin(**choices)
