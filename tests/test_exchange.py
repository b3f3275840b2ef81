"""What ranks see and exchange: every sample once, metrics of the right length, collectives, and the same errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ALL_RANKS = [1, 2, 3, 4]


class Samples(Dataset[tuple[int, Tensor]]):
    """Samples that know their number, twice: as it is and in a tensor."""

    def __init__(self, count: int) -> None:
        self.x = torch.arange(count * 2.0).reshape(count, 2)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


def see_everything(shuffle: bool, even: bool) -> list[Any]:
    """For every length and batch size: numbers this rank saw, and what a metric over all ranks gets, twice over."""
    from drivetrain import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    seen = []
    for count in (1, 2, 5, 13):
        for batch in (1, 3):
            loader = accelerator.prepare(DataLoader(Samples(count), batch_size=batch, shuffle=shuffle))
            for _ in range(2):
                mine, metric = [], []
                for index, x in loader:
                    mine += index.tolist()
                    if even:
                        gathered_index, gathered_x = accelerator.gather_for_metrics((index, x))
                        assert torch.equal(gathered_x, Samples(count).x[gathered_index])
                        metric += gathered_index.tolist()
                seen.append((count, mine, metric))
    return seen


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_metrics_over_any_length_have_every_sample_exactly_once(worker_pool: Any, ranks: int, shuffle: bool) -> None:
    for count, _, metric in worker_pool(ranks).run(see_everything, shuffle, True)[-1]:
        assert sorted(metric) == list(range(count))
        assert shuffle or metric == list(range(count))


@pytest.mark.parametrize("ranks", ALL_RANKS)
def test_ranks_share_the_samples_without_overlap_when_uneven(worker_pool: Any, ranks: int) -> None:
    outcomes = worker_pool(ranks).run(see_everything, True, False)
    for passes in zip(*outcomes, strict=True):
        count = passes[0][0]
        assert sorted(number for _, mine, _ in passes for number in mine) == list(range(count))


# ---------------------------------------------------------------------------------------------------------- collectives


def exchange() -> dict[str, Any]:
    from drivetrain import Accelerator
    from drivetrain.collectives import broadcast

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    mine = {
        "rows": torch.tensor([[rank, rank]]),
        "scalar": torch.tensor(float(rank)),
        "flag": torch.tensor([rank == 0]),
    }
    gathered = accelerator.gather(mine)
    return {
        "rows": gathered["rows"].tolist(),
        "scalar": gathered["scalar"].tolist(),
        "flag": gathered["flag"].tolist(),
        "sum": accelerator.reduce(torch.tensor([1.0, float(rank)])).tolist(),
        "mean": accelerator.reduce(torch.tensor([1, rank]), "mean").tolist(),
        "max": accelerator.reduce(torch.tensor(rank), "max").item(),
        "from last": broadcast(accelerator.run, torch.tensor(rank), accelerator.num_processes - 1).item(),
    }


def test_collectives_join_in_rank_order_and_agree(worker_pool: Any) -> None:
    expected = {
        "rows": [[0, 0], [1, 1], [2, 2]],
        "scalar": [0.0, 1.0, 2.0],
        "flag": [True, False, False],
        "sum": [3.0, 3.0],
        "mean": [1.0, 1.0],
        "max": 2,
        "from last": 2,
    }
    assert worker_pool(3).run(exchange) == [expected] * 3


def mismatch(what: str) -> str:
    from drivetrain import Accelerator
    from drivetrain.errors import CollectiveMismatchError
    from drivetrain.utils import broadcast_object_list, gather_object, wait_for_everyone

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    call, data = {
        "shape": (accelerator.gather, torch.zeros(2 + rank, 3)),
        "dtype": (accelerator.reduce, torch.zeros(2, dtype=[torch.float32, torch.float64][rank])),
        "structure": (accelerator.gather, {"a": torch.zeros(1)} if rank else [torch.zeros(1), torch.zeros(1)]),
        "operation": (accelerator.gather if rank else accelerator.reduce, torch.zeros(2)),
        "objects": (broadcast_object_list if rank else gather_object, [1]),
        "barrier": (lambda _: wait_for_everyone() if rank else accelerator.gather_for_metrics([1], True), None),
        "flag": (lambda _: accelerator.wait_for_everyone() if rank else accelerator.check_trigger(), None),
    }[what]
    with pytest.raises(CollectiveMismatchError) as caught:
        call(data)
    accelerator.wait_for_everyone()  # the ranks are in step after it
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["(2, 3) float32", "(3, 3) float32"]),
        ("dtype", ["float32", "float64"]),
        ("structure", ["rank 0: gather", "rank 1: gather"]),
        ("operation", ["rank 0: reduce (sum)", "rank 1: gather"]),
        ("objects", ["rank 0: gather_object", "rank 1: broadcast_object_list from 0"]),
        ("barrier", ["rank 0: gather_object", "rank 1: wait_for_everyone"]),
        ("flag", ["rank 0: check_trigger", "rank 1: wait_for_everyone"]),
    ],
)
def test_mismatched_collectives_are_the_same_error_on_all_ranks(worker_pool: Any, what: str, words: list[str]) -> None:
    first, second = worker_pool(2).run(mismatch, what)
    assert first == second
    assert all(word in first for word in words)
