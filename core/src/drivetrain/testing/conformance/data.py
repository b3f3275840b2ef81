"""Group *data*: every sample of an epoch is seen exactly once, whatever the number of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.recipes import WIDTH, Samples, digest, mlp
from drivetrain.testing.conformance.subject import Subject

__all__ = ["checks"]

checks = CheckList("data")


class Counted(Dataset[dict[str, Any]]):
    """Samples that are their number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "pair": torch.tensor([index, -index]), "name": f"sample {index}"}


class Stream(IterableDataset[dict[str, Any]]):
    """The same, of which nobody knows how many there will be."""

    def __init__(self, count: int) -> None:
        self.source = Counted(count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.source[index] for index in range(len(self.source)))


@attrs.frozen
class Epoch:
    """What one rank saw of an epoch."""

    own: list[int]
    """Numbers of the samples of its own batches."""
    sizes: list[int]
    gathered: list[int]
    pairs: list[list[int]]
    names: list[str]
    device: str


def iterate(counts: Sequence[int], stream: bool, shuffle: bool, epochs: int = 1) -> list[list[Epoch]]:
    """Iterate prepared loaders of so many samples; their epochs."""
    from drivetrain import Accelerator, set_seed

    set_seed(5)
    accelerator = Accelerator()
    return [_epochs(accelerator, count, stream, shuffle, epochs) for count in counts]


def _epochs(accelerator: Any, count: int, stream: bool, shuffle: bool, epochs: int) -> list[Epoch]:
    """Iterate one, and gather what a metric would."""
    data: Any = Stream(count) if stream else Counted(count)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=shuffle))
    found = []
    for _ in range(epochs):
        seen = Epoch([], [], [], [], [], "")
        for batch in loader:
            seen.own.extend(batch["index"].tolist())
            seen.sizes.append(len(batch["index"]))
            whole = accelerator.gather_for_metrics(batch)
            seen.gathered.extend(whole["index"].tolist())
            seen.pairs.extend(whole["pair"].tolist())
            seen.names.extend(whole["name"])
            seen = attrs.evolve(seen, device=batch["index"].device.type)
        found.append(seen)
    return found


def _check_epoch(subject: Subject, ranks: list[Epoch], count: int) -> None:
    everything = list(range(count))
    for rank, seen in enumerate(ranks):
        expect(sorted(seen.gathered), everything, f"samples that gather_for_metrics gave on rank {rank}")
        expect(seen.pairs, [[index, -index] for index in seen.gathered], f"rows that belong to them on rank {rank}")
        expect(seen.names, [f"sample {index}" for index in seen.gathered], f"texts that belong to them on rank {rank}")
        expect(seen.sizes, ranks[0].sizes, f"sizes of the batches on rank {rank}")
        expect(seen.gathered, ranks[0].gathered, f"order of the gathered samples on rank {rank}")
        expect(seen.device, subject.facts.device, f"device of the batches on rank {rank}")
    lost = set(everything) - {index for seen in ranks for index in seen.own}
    if lost:
        raise Violation(f"samples {sorted(lost)} are in no rank's batches")


def _counts(subject: Subject) -> list[int]:
    """Lengths that come out even, leave a short last batch, and leave some shards without one."""
    shards = subject.facts.data_size
    return [4 * shards * 2, 4 * shards * 2 + 3, 4 * shards + 1]


@checks("each sample of a map is seen once in an epoch, and metrics are exact, also where the length is uneven")
def maps(subject: Subject) -> None:
    _check_epochs(subject, _counts(subject), subject.run(iterate, _counts(subject), False, True, 2))


def _check_epochs(subject: Subject, counts: Sequence[int], ranks: Sequence[Sequence[Sequence[Epoch]]]) -> None:
    for count, *loader in zip(counts, *ranks, strict=True):
        for epochs in zip(*loader, strict=True):
            _check_epoch(subject, list(epochs), count)


@checks("an epoch that is shuffled has another order than the one before it, the same on all ranks")
def shuffled(subject: Subject) -> None:
    [[first, second]] = subject.run(iterate, [64], False, True, 2)[0]
    if first.gathered == second.gathered or first.gathered == list(range(64)):
        raise Violation("shuffle=True, but two epochs have the same order")


@checks("each sample of a stream is seen once, and metrics are exact")
def streams(subject: Subject) -> None:
    counts = _counts(subject)[1:]
    _check_epochs(subject, counts, subject.run(iterate, counts, True, False))


# --------------------------------------------------------------------------------------------------- uneven inputs


@attrs.frozen
class Joined:
    """What one rank saw of a training on uneven data."""

    seen: list[int]
    batches: int
    digest: str
    changed: bool


def join() -> Joined:
    """Train while the first rank has a batch more than the others."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = mlp()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    samples = Samples(WIDTH * (2 * accelerator.run.world.data_size + 1))
    loader = DataLoader(samples, batch_size=WIDTH)
    model, optimizer, loader = accelerator.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    seen: list[int] = []
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for index, x, y in loader:
            seen += index.tolist()
            batches += 1
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, Tensor] = accelerator.get_state_dict(model)
    changed = not state or any(not torch.equal(a.cpu(), b) for a, b in zip(state.values(), start, strict=True))
    return Joined(seen, batches, digest(accelerator, model), changed)


@checks(
    "ranks may run out of batches at different times where that is claimed, and it is refused where it is not",
    unclaimed=lambda subject: "one process has nobody to wait for" if subject.size == 1 else None,
)
def uneven(subject: Subject) -> None:
    if not subject.facts.capabilities.uneven_inputs:
        subject.refuse(join, what="join_uneven_inputs, which is not claimed (uneven_inputs=False),")
        return
    ranks: list[Joined] = subject.run(join)
    everything = sorted(index for found in ranks for index in found.seen)
    expect(everything, list(range(len(everything))), "samples trained on, over all ranks")
    if len({found.batches for found in ranks}) == 1:
        raise Violation(f"every rank had {ranks[0].batches} batches: the data was not uneven")
    if not all(found.changed for found in ranks):
        raise Violation("nothing was trained")
    if not subject.facts.capabilities.shards_params:
        expect(len({found.digest for found in ranks}), 1, "different sets of weights at the end")
