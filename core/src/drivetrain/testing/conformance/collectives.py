"""Group *collectives*: every operation on every dtype the device has, and one error on all ranks for a mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.subject import Subject

__all__ = ["checks"]

checks = CheckList("collectives")

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


def on_device(accelerator: Any, values: Any, dtype: str) -> Tensor | None:
    """A tensor on the device of the run; None if that has no such dtype."""
    try:
        return torch.tensor(values, dtype=getattr(torch, dtype)).to(accelerator.device)
    except (RuntimeError, TypeError):
        return None


def gather(dtypes: Sequence[str]) -> dict[str, list[Any]]:
    """Gather tensors of every dtype that the device has."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    found = {dtype: _gather(accelerator, dtype) for dtype in dtypes}
    return {dtype: values for dtype, values in found.items() if values}


def _gather(accelerator: Any, dtype: str) -> list[Any]:
    """A vector, a 0-d tensor, an empty one and one that is not contiguous."""
    rank = accelerator.process_index
    vector = on_device(accelerator, [rank, rank + 1], dtype)
    if vector is None:
        return []
    scalar, empty = vector[0], vector[:0]
    strided = torch.stack([vector, vector + vector]).t()
    found = [accelerator.gather(one) for one in (vector, scalar, empty, strided)]
    before = on_device(accelerator, [rank, rank + 1], dtype)
    kept = bool((vector == before).all())
    return [[one.tolist() for one in found], [str(one.dtype) for one in found], kept]


@checks("gather joins tensors of all ranks in rank order, of every dtype and layout")
def gathers(subject: Subject) -> None:
    for rank, everything in enumerate(subject.run(gather, _DTYPES)):
        for dtype, (values, dtypes, kept) in everything.items():
            expect(values, _gathered(dtype, subject.size), f"gather of {dtype} on rank {rank}")
            expect(dtypes, [f"torch.{dtype}"] * 4, f"dtypes gathered from {dtype} on rank {rank}")
            expect(kept, True, f"the argument of gather stays as it was ({dtype}, rank {rank})")


def _gathered(dtype: str, size: int) -> list[Any]:
    as_type = {"bool": bool, "float": float}.get(dtype.rstrip("0123456789").replace("bfloat", "float"), int)
    pairs = [[as_type(rank), as_type(rank + 1)] for rank in range(size)]
    double = (lambda value: value) if dtype == "bool" else (lambda value: value * 2)
    return [
        [value for pair in pairs for value in pair],
        [pair[0] for pair in pairs],
        [],
        [[value, double(value)] for pair in pairs for value in pair],
    ]


def reduce(dtypes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reduce tensors of every dtype that the device has."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    return {dtype: _reduce(accelerator, dtype) for dtype in dtypes}


def _reduce(accelerator: Any, dtype: str) -> dict[str, Any]:
    """A vector and a 0-d tensor, by every operation."""
    rank = accelerator.process_index
    vector = on_device(accelerator, [rank + 1, 4 * (rank + 1)], dtype)
    if vector is None:
        return {}
    found: dict[str, Any] = {}
    for op in ("sum", "max", "min", *(["mean"] if vector.is_floating_point() else [])):
        found[op] = [accelerator.reduce(vector, op).tolist(), accelerator.reduce(vector[0], op).item()]
    found["kept"] = vector.tolist() == [rank + 1, 4 * (rank + 1)]
    return found


@checks("reduce takes sum, mean, maximum and minimum over all ranks")
def reduces(subject: Subject) -> None:
    ranks = [rank + 1 for rank in range(subject.size)]
    right = {"sum": sum(ranks), "max": max(ranks), "min": 1, "mean": sum(ranks) / len(ranks)}
    for rank, everything in enumerate(subject.run(reduce, _DTYPES[:-1])):
        for dtype, found in everything.items():
            expect(found.pop("kept", True), True, f"the argument of reduce stays as it was ({dtype}, rank {rank})")
            for op, values in found.items():
                expect(values, [[right[op], 4 * right[op]], right[op]], f"reduce({op}) of {dtype} on rank {rank}")


def broadcast() -> list[Any]:
    """Broadcast a tensor and an object from every rank."""
    from drivetrain import Accelerator
    from drivetrain.collectives import broadcast, broadcast_object_list

    accelerator = Accelerator()
    rank = accelerator.process_index
    found = []
    for source in range(accelerator.num_processes):
        mine = torch.tensor([rank, rank + 10], device=accelerator.device)
        sent = broadcast(accelerator.run, {"a": mine, "b": mine[0]}, source)
        things = broadcast_object_list(accelerator.run, [{"from": rank}, None], source)
        found.append([sent["a"].tolist(), sent["b"].item(), things, mine.tolist() == [rank, rank + 10]])
    return found


@checks("broadcast sends tensors and objects from any rank")
def broadcasts(subject: Subject) -> None:
    right = [[[source, source + 10], source, [{"from": source}, None], True] for source in range(subject.size)]
    for rank, found in enumerate(subject.run(broadcast)):
        expect(found, right, f"what rank {rank} got from each rank, and whether its own tensor stayed as it was")


def objects() -> list[Any]:
    """Gather lists of objects, and wait for each other."""
    from drivetrain import Accelerator
    from drivetrain.collectives import gather_object

    accelerator = Accelerator()
    rank = accelerator.process_index
    found = gather_object(accelerator.run, [{"rank": rank}] * (rank + 1))
    accelerator.wait_for_everyone()
    return found


@checks("objects are gathered in rank order, also lists of different lengths")
def gathers_objects(subject: Subject) -> None:
    right = [{"rank": rank} for rank in range(subject.size) for _ in range(rank + 1)]
    expect(subject.run(objects), [right] * subject.size, "gathered objects, by rank")


def pad() -> list[list[float]]:
    """Gather tensors of different lengths, padded."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    mine = torch.ones(accelerator.process_index + 1, device=accelerator.device)
    gathered: Tensor = accelerator.gather(accelerator.pad_across_processes(mine, pad_index=-1).unsqueeze(0))
    rows: list[list[float]] = gathered.tolist()
    return rows


@checks("tensors of different lengths are padded to the longest of any rank")
def pads(subject: Subject) -> None:
    right = [[1.0] * (rank + 1) + [-1.0] * (subject.size - rank - 1) for rank in range(subject.size)]
    expect(subject.run(pad), [right] * subject.size, "padded and gathered rows, by rank")


def trigger() -> list[bool]:
    """Raise a flag on the last rank, and look at it twice."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [accelerator.check_trigger(), accelerator.check_trigger()]


@checks("a flag that one rank raises is seen by all, once")
def triggers(subject: Subject) -> None:
    expect(subject.run(trigger), [[True, False]] * subject.size, "check_trigger, twice on each rank")


def mismatch(kind: str) -> None:
    """Come to the same collective with other data than the others."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    odd = accelerator.is_last_process
    if kind == "shape":
        accelerator.gather(torch.ones(3 if odd else 2, device=accelerator.device))
    else:
        accelerator.reduce(torch.ones(2, dtype=torch.int32 if odd else torch.float32, device=accelerator.device))


@checks(
    "ranks that come to a collective with different data get the same error, and none waits",
    unclaimed=lambda subject: "one process has nobody to differ from" if subject.size == 1 else None,
)
def mismatches(subject: Subject) -> None:
    for kind in ("shape", "dtype"):
        messages = subject.refuse(mismatch, kind, what=f"a {kind} that differs", error="CollectiveMismatchError")
        if len(set(messages)) != 1:
            raise Violation(f"ranks report the same mismatch of {kind} with different words: {messages}")
