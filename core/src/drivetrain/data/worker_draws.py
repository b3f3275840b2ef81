"""What a loader's workers draw at random, such as augmentations: a function of the batch, not of the worker's past.

A worker's own generators go on from batch to batch, and are gone when the run is. Seeding them for each batch lets a
resumed epoch draw what the unbroken one would have, with any number of workers.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from drivetrain.data.randomness import seed_everything

__all__ = ["SeededBatch", "SeededDataset", "SeededStart"]


class SeededBatch(NamedTuple):
    """What a worker is sent in place of indices, or of the key of a sample."""

    wanted: Any
    seed: int


class SeededDataset:
    """Stands in for a map-style dataset in the workers of a loader.

    Args:
        dataset: The user's. All but fetching is left to it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        importlib.import_module("numpy.random")  # takes a while: else each worker would, in each epoch

    def __getitem__(self, batch: SeededBatch) -> Any:
        _seed(batch.seed)
        return self.dataset[batch.wanted]

    def __getitems__(self, batch: SeededBatch) -> Any:
        _seed(batch.seed)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(batch.wanted) if fetch else [self.dataset[index] for index in batch.wanted]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _seed(seed: int) -> None:
    # A worker that is a thread shares the process's generators with the training.
    if threading.current_thread() is threading.main_thread():
        seed_everything(seed)


class SeededStart:
    """The ``worker_init_fn`` of such a loader.

    Args:
        given: The user's; called as in any loader.
    """

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> None:
        # Code of the user's that asks for its dataset is to get that, and not what stands in for it.
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen, in one torch or another
        if self.given is not None:
            self.given(worker)
