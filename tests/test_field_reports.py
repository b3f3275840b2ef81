"""Right values for reported faults in data and collectives, where no other test has them.

Everything that needs ranks runs on two real ones, in tasks that take milliseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Accelerator, AutocastKwargs, DataLoaderConfiguration, PartialState, set_seed
from drivetrain.launch import notebook_launcher
from drivetrain.testing.pool import WorkerError


class Numbers(IterableDataset[int]):
    """A stream of 0, 1, 2, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def with_texts(samples: list[int]) -> dict[str, Any]:
    """A batch of a tensor, a text for each sample and one flag for all."""
    return {"x": torch.tensor(samples), "name": [f"s{sample}" for sample in samples], "flag": True}


# ----------------------------------------------------------------------------------------------------------------- data


def dispatch_texts() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(8), batch_size=2, collate_fn=with_texts))
    return [(batch["x"].tolist(), batch["name"], batch["flag"]) for batch in loader]


def test_texts_and_flags_of_a_dispatched_stream_reach_their_rank(worker_pool: Any) -> None:
    assert worker_pool(2).run(dispatch_texts) == [
        [([0, 1], ["s0", "s1"], True), ([4, 5], ["s4", "s5"], True)],
        [([2, 3], ["s2", "s3"], True), ([6, 7], ["s6", "s7"], True)],
    ]


def dispatch_maps() -> list[tuple[int, int, bool, int, int, list[int]]]:
    """Lengths of dispatched loaders, the batches they give, and what a metric gets, over a sweep."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    found = []
    for count in range(1, 10):
        for size in (1, 2, 3):
            for drop_last in (False, True):
                loader = accelerator.prepare(DataLoader(range(count), batch_size=size, drop_last=drop_last))
                metric = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
                found.append((count, size, drop_last, len(loader), len(metric), list(chain.from_iterable(metric))))
    return found


def test_the_length_of_a_dispatched_loader_is_the_number_of_its_batches(worker_pool: Any) -> None:
    for count, size, drop_last, length, batches, metric in worker_pool(2).run(dispatch_maps)[1]:
        assert length == batches
        assert metric == list(range(count - count % (2 * size) if drop_last else count))


class Noisy(Dataset[Tensor]):
    """Samples that draw a number when they are loaded."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def shuffle_with_own_seeds() -> list[list[float]]:
    accelerator = Accelerator(cpu=True)
    set_seed(5, device_specific=True)
    loader = accelerator.prepare(DataLoader(Noisy(), batch_size=1, shuffle=True))
    return torch.cat(list(loader)).tolist()


def test_ranks_seeded_apart_share_an_order_and_draw_for_themselves(worker_pool: Any) -> None:
    one, other = worker_pool(2).run(shuffle_with_own_seeds)
    indices = [int(index) for index, _ in one + other]
    assert sorted(indices) == list(range(22))
    assert indices != sorted(indices)
    assert len({drawn for _, drawn in one + other}) == 22


def split_in_the_constructor() -> list[list[int]]:
    loader = Accelerator(cpu=True, split_batches=True).prepare(DataLoader(range(8), batch_size=4))
    return [batch.tolist() for batch in loader]


def test_split_batches_counts_where_old_scripts_give_it(worker_pool: Any) -> None:
    assert worker_pool(2).run(split_in_the_constructor) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


# ---------------------------------------------------------------------------------------------------------- collectives


def gather_texts() -> dict[str, list[Any]]:
    """A metric of mixed fields and a loss a rank; the last round has one sample in all."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2, collate_fn=with_texts))
    found: dict[str, list[Any]] = {"x": [], "name": [], "loss": []}
    for batch in loader:
        loss = torch.tensor(float(accelerator.process_index))
        gathered = accelerator.gather_for_metrics({"x": batch["x"], "name": batch["name"], "loss": loss})
        for key, values in gathered.items():
            found[key] += values.tolist() if isinstance(values, Tensor) else values
    return found


def test_a_metric_of_tensors_and_texts_keeps_both_and_a_loss_of_each_rank(worker_pool: Any) -> None:
    expected = {"x": [0, 1, 2, 3, 4], "name": ["s0", "s1", "s2", "s3", "s4"], "loss": [0.0, 1.0] * 2}
    assert worker_pool(2).run(gather_texts) == [expected] * 2


def exchange() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    flags = accelerator.pad_across_processes(torch.ones(2, 2 + 2 * rank, dtype=torch.bool), dim=1)
    rows = accelerator.pad_across_processes(torch.ones(1 + 3 * rank, 3))
    whole = torch.tensor([[1, 0], [2, 3]][rank])
    return {
        "flags": (flags.dtype == torch.bool, flags.int().tolist()),
        "rows": accelerator.gather(rows).sum(1).tolist(),
        "sum": accelerator.reduce(whole, "sum").tolist(),
        "mean of whole numbers": accelerator.reduce(whole, "mean").tolist(),
        "mean": accelerator.reduce(whole.float(), "mean").tolist(),
    }


def test_padding_keeps_booleans_and_means_are_means(worker_pool: Any) -> None:
    expected = {
        "rows": [3.0, 0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0],
        "sum": [3, 3],
        "mean of whole numbers": [1.5, 1.5],
        "mean": [1.5, 1.5],
    }
    one, other = worker_pool(2).run(exchange)
    assert one == {"flags": (True, [[1, 1, 0, 0]] * 2), **expected}
    assert other == {"flags": (True, [[1, 1, 1, 1]] * 2), **expected}


def mean_alone() -> list[float]:
    return Accelerator(cpu=True).reduce(torch.tensor([1, 2]), "mean").tolist()


def test_the_mean_of_whole_numbers_is_no_whole_number_in_one_process_either(worker_pool: Any) -> None:
    (found,) = worker_pool(1).run(mean_alone)
    assert [type(value) for value in found] == [float, float]


def pad_other_dimensions() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.pad_across_processes(torch.ones([2] * (1 + accelerator.process_index)), dim=1)


def test_padding_tensors_of_different_dimensions_is_an_error_on_all_ranks(worker_pool: Any) -> None:
    with pytest.raises(
        WorkerError, match="same structure, dimensions:\n  rank 0: .* of 1-d\n  rank 1: .* of 2-d$"
    ) as e:
        worker_pool(2).run(pad_other_dimensions)
    assert len(e.value.errors) == 2


def gather_in_other_orders() -> None:
    accelerator = Accelerator(cpu=True)
    names = ["a", "b"] if accelerator.is_main_process else ["b", "a"]
    accelerator.gather({name: torch.ones(1) for name in names})


def test_mappings_filled_in_different_orders_are_an_error_and_not_mixed_up(worker_pool: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(2).run(gather_in_other_orders)
    (message,) = {error.message for error in caught.value.errors}
    assert message.splitlines()[1:] == [
        "  rank 0: gather of a: (1,) float32, b: (1,) float32",
        "  rank 1: gather of b: (1,) float32, a: (1,) float32",
    ]


def split(inputs: Any, padding: bool) -> tuple[Any, Any]:
    with PartialState(cpu=True).split_between_processes(inputs, padding) as part:
        return part, inputs


def test_splitting_keeps_its_input_and_pads_tuples_too(worker_pool: Any) -> None:
    given = {"a": [1, 2, 3], "b": ("x", "y", "z")}
    assert worker_pool(2).run(split, given, True) == [
        ({"a": [1, 2], "b": ("x", "y")}, given),
        ({"a": [3, 3], "b": ("z", "z")}, given),
    ]


# ------------------------------------------------------------------------------------------------------------ the world


class NoHandler:
    pass


@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        ([NoHandler()], "kwargs_handlers takes KwargsHandler objects; got NoHandler"),
        ([AutocastKwargs(), AutocastKwargs(enabled=False)], "kwargs_handlers has two AutocastKwargs; give one"),
    ],
)
def test_handlers_of_no_or_of_one_class_are_refused(handlers: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Accelerator(cpu=True, kwargs_handlers=handlers)


def test_scripts_may_give_the_arguments_of_the_notebook_launcher_by_position() -> None:
    # In the order in which they have always been there: what comes later goes to the end.
    assert list(inspect.signature(notebook_launcher).parameters) == [
        "function",
        "args",
        "num_processes",
        "mixed_precision",
        "use_port",
        "master_addr",
        "node_rank",
        "num_nodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_conf",
        "rdzv_id",
        "max_restarts",
        "monitor_interval",
        "log_line_prefix_template",
    ]


def who_am_i() -> tuple[str, int, int]:
    accelerator = Accelerator()
    return str(accelerator.device), accelerator.num_processes, accelerator.reduce(torch.tensor(1)).item()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="two ranks would share the accelerator")
def test_ranks_of_a_foreign_launcher_find_each_other_without_being_told_of_the_cpu(worker_pool: Any) -> None:
    assert worker_pool(2).run(who_am_i) == [("cpu", 2, 2)] * 2
