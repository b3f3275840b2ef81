"""Prepared loaders, each rank simulated in this process."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.data.configuration import DataLoaderConfiguration
from drivetrain.data.preparing import prepare_loader

__all__ = ["epoch", "metric", "prepare", "samples"]


def prepare(
    loader: Any,
    rank: int = 0,
    ranks: int = 1,
    *,
    place: Any = None,
    gate: Any = None,
    feeds: int = 1,
    base_seed: int = 7,
    collectives: Any = None,
    **options: Any,
) -> Any:
    """What one rank of several gets; ``options`` are those of ``DataLoaderConfiguration``."""
    return prepare_loader(
        loader,
        data_rank=rank,
        data_size=ranks,
        feeds=feeds,
        place=place,
        configuration=DataLoaderConfiguration(**options),
        gate=gate,
        base_seed=base_seed,
        collectives=collectives,
    )


def epoch(loader: Any) -> list[list[int]]:
    """The batches of a pass."""
    return [batch.tolist() for batch in loader]


def samples(loader: Any) -> list[int]:
    """The samples of a pass."""
    return [index for batch in epoch(loader) for index in batch]


def metric(loaders: list[Any]) -> list[int]:
    """What gathering every batch over all ranks and trimming it gives."""
    found: list[int] = []
    for batches in zip(*loaders, strict=True):
        gathered = torch.cat(batches)
        for loader, batch in zip(loaders, batches, strict=True):
            kept = loader.rows.trim(gathered, len(batch))
        found += kept.tolist()
    return found
