"""Tensors in pieces: index arithmetic against plain slicing, gathering and files on real ranks, and the scaler."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import defaults
from drivetrain.binding import Hooks, Origin
from drivetrain.checkpoint.sharded_files import ShardedFiles, is_sharded, write
from drivetrain.config import RunConfig
from drivetrain.errors import CheckpointError, DrivetrainError
from drivetrain.plugin import Policy
from drivetrain.world import Run, Topology
from drivetrain_backends import TorchDistributedBackend
from drivetrain_backends.pieces import Layout, Part, Piece, gather, piece_of, survey
from drivetrain_backends.scaler import ShardedGradScaler


@contextlib.contextmanager
def run_on_ranks() -> Iterator[Run]:
    hooks = Hooks(defaults)
    plugin = TorchDistributedBackend()
    plugin.api = (1, 0)
    hooks.register(plugin, Origin("backend", "plain"))
    topology, config = Topology.from_environment(), RunConfig(collective_timeout=10.0)
    world = hooks.init_world(config=config, topology=topology, device=torch.device("cpu"), collectives="gloo")
    names = {"backend": "plain", "device": "cpu", "precision": "no"}
    run = Run(
        config=config,
        topology=topology,
        world=world,
        policy=Policy(),
        capabilities=plugin.capabilities,
        names=names,
        hooks=hooks,
    )
    try:
        yield run
    except BaseException as error:
        hooks.shutdown(run=run, error=error)
        raise
    hooks.shutdown(run=run, error=None)


def one_process() -> Run:
    hooks = Hooks(defaults)
    world = defaults.init_world(RunConfig(), Topology(), torch.device("cpu"), None)
    return Run(
        config=RunConfig(), topology=Topology(), world=world, policy=Policy(), capabilities=None, names={}, hooks=hooks
    )


def cut(whole: torch.Tensor, bounds: list[int], rank: int) -> Piece:
    """The rank's piece of a tensor that is cut at these positions; ranks beyond them hold nothing."""
    start, stop = (bounds[rank], bounds[rank + 1]) if rank + 1 < len(bounds) else (0, 0)
    return Piece(whole.reshape(-1)[start:stop].clone(), start, tuple(whole.shape))


@st.composite
def cuts(draw: Any, numel: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, numel), max_size=5))
    return [0, *sorted(inner), numel]


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(deadline=None, max_examples=200)
@given(st.data(), shapes)
def test_files_cut_in_any_way_are_read_in_any_other(data: Any, shape: tuple[int, ...]) -> None:
    import tempfile

    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    saved, loaded = data.draw(cuts(whole.numel())), data.draw(cuts(whole.numel()))
    run = one_process()
    ranks = len(saved) - 1
    parts = {(a, b): Part(a, b, rank) for rank, (a, b) in reversed(list(enumerate(itertools.pairwise(saved)))) if a < b}
    layout = {"t": Layout(shape, whole.dtype, tuple(parts[key] for key in sorted(parts)))}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            as_rank = attrs.evolve(run, world=attrs.evolve(run.world, rank=rank, size=ranks))
            write(as_rank, Path(folder), {"t": cut(whole, saved, rank)}, layout, None, "a tensor")
        assert is_sharded(Path(folder))
        with ShardedFiles.open(Path(folder)) as files:
            assert files.layouts == layout
            for rank in range(len(loaded) - 1):
                expected = cut(whole, loaded, rank)
                piece = attrs.evolve(expected, local=torch.full_like(expected.local, -1))
                files.read_into("t", piece)
                assert torch.equal(piece.local, expected.local)


def test_pieces_write_through_whatever_their_shape() -> None:
    tensor = torch.zeros(2, 3)
    piece_of(tensor).write(torch.arange(6.0), 0)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    piece_of(tensor.t()).write(torch.arange(6.0), 0)
    assert tensor.t().tolist() == [[0, 1], [2, 3], [4, 5]]
    Piece(tensor[1], 3, (2, 3)).write(torch.tensor([9.0]), 4)
    assert tensor[1].tolist() == [1, 9, 5]


def test_a_damaged_piece_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    from drivetrain.checkpoint.tensors import write_tensors

    run = one_process()
    whole = torch.arange(6.0)
    layout = {"t": Layout((6,), whole.dtype, (Part(0, 6, 0),))}
    write(run, tmp_path, {"t": piece_of(whole)}, layout, {"note": 1}, "a tensor")
    write_tensors(tmp_path / "rank_00000.safetensors", {"t": whole[:5]})
    with ShardedFiles.open(tmp_path) as files:
        assert files.others == {"note": 1}
        with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged"):
            files.read_into("t", piece_of(torch.zeros(6)))


# ------------------------------------------------------------------------------------------------------- on real ranks


def gather_on_ranks() -> Any:
    """Uneven cuts, pieces held twice, a rank without any, scalars, and a dtype that is no float."""
    wholes = {
        "uneven": torch.arange(10, dtype=torch.bfloat16).view(5, 2),
        "on the last": torch.arange(3),
        "everywhere": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    with run_on_ranks() as run:
        rank = run.world.rank
        pieces = {
            "uneven": cut(wholes["uneven"], [0, 7, 7, 10], rank),
            "everywhere": piece_of(wholes["everywhere"]),
            "empty": piece_of(wholes["empty"]),
        }
        if rank == 2:
            pieces["on the last"] = piece_of(wholes["on the last"])
        layouts = survey(run, pieces)
        found = dict(gather(run, pieces, layouts))
        if rank == 0:
            assert found.keys() == wholes.keys()
            torch.testing.assert_close(found, wholes, rtol=0, atol=0)
        else:
            assert found == {}
        return {name: layout.parts for name, layout in layouts.items()}


def test_pieces_of_any_cut_are_made_whole_on_rank_0(worker_pool: Any) -> None:
    ranks = worker_pool(3).run(gather_on_ranks)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0]["uneven"] == (Part(0, 7, 0), Part(7, 10, 2))
    assert ranks[0]["everywhere"] == (Part(0, 1, 0),)


def survey_wrong(gap: bool) -> None:
    with run_on_ranks() as run:
        rank = run.world.rank
        shape = (4,) if gap or rank == 0 else (5,)
        survey(run, {"t": Piece(torch.zeros(1), rank, shape)})


def test_pieces_that_do_not_fit_together_are_refused_on_all_ranks(worker_pool: Any) -> None:
    from drivetrain.testing.pool import WorkerError

    for gap, message in ((True, "leave gaps or overlap"), (False, "pieces of different tensors")):
        with pytest.raises(WorkerError, match=message) as caught:
            worker_pool(2).run(survey_wrong, gap)
        assert len({error.message for error in caught.value.errors}) == 1
        assert DrivetrainError.__name__ in caught.value.errors[0].type


def dtensor_pieces(rows: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with run_on_ranks() as run:
        whole = torch.arange(rows * 3.0).view(rows, 3)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        piece = piece_of(tensor)
        assert piece.read().tolist() == whole.flatten()[piece.start : piece.stop].tolist()
        found = dict(gather(run, {"t": piece}, survey(run, {"t": piece}), mesh.get_group("shard")))
        assert run.world.rank or torch.equal(found["t"], whole)
        with pytest.raises(DrivetrainError, match="cut once, along their first dimension"):
            piece_of(distribute_tensor(whole, mesh, [Replicate(), Shard(1)]))
        return piece.start, piece.stop


@pytest.mark.parametrize(("rows", "expected"), [(5, [(0, 9), (9, 15)]), (1, [(0, 3), (3, 3)])])
def test_a_dtensor_is_a_piece_of_rows(worker_pool: Any, rows: int, expected: list[Any]) -> None:
    assert worker_pool(4).run(dtensor_pieces, rows) == expected * 2


def scale_on_ranks() -> Any:
    """Rank 1 alone has an infinite gradient; rank 0 has none at all."""
    with run_on_ranks() as run:
        scaler = ShardedGradScaler(run, init_scale=4.0)
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        seen = []
        for value in (8.0, math.inf, 4.0):
            scaler.scale(torch.ones(()))
            if run.world.rank == 1:
                parameter.grad = torch.tensor([value, 4.0])
            scaler.step(optimizer)
            scaler.update()
            seen.append((parameter.tolist(), scaler.get_scale()))
        return seen


def test_an_overflow_on_one_rank_is_one_on_all(worker_pool: Any) -> None:
    nothing, found = worker_pool(2).run(scale_on_ranks)
    assert found == [([-1.0, 0.0], 4.0), ([-1.0, 0.0], 2.0), ([-3.0, -2.0], 2.0)]
    assert nothing == [([1.0, 1.0], 4.0), ([1.0, 1.0], 2.0), ([1.0, 1.0], 2.0)]
