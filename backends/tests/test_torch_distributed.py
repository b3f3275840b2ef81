"""The torch.distributed ground on real ranks: collectives against plain Python, the world's life, and its failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain import defaults
from drivetrain.binding import Hooks, Origin
from drivetrain.config import RunConfig
from drivetrain.errors import CollectiveError, CollectiveMismatchError, ConfigError, DrivetrainError, StateConflictError
from drivetrain.plugin import Capabilities, Policy
from drivetrain.testing.pool import WorkerError
from drivetrain.world import Run, Topology
from drivetrain_backends import TorchDistributedBackend
from drivetrain_backends.replicas import check_same_model, copy_from_first_rank


class Ground(TorchDistributedBackend):
    api = (1, 0)


@contextmanager
def world(**settings: Any) -> Iterator[Run]:
    """A run on the environment's ranks, over gloo."""
    hooks = Hooks(defaults)
    hooks.register(Ground(), Origin("backend", "ground"))
    topology = Topology.from_environment()
    config = RunConfig(**{"collective_timeout": 10.0, **settings})
    place = hooks.init_world(config=config, topology=topology, device=torch.device("cpu"), collectives="gloo")
    run = Run(
        config=config,
        topology=topology,
        world=place,
        policy=Policy(),
        capabilities=Capabilities(),
        names={"backend": "ground", "device": "cpu", "precision": "no"},
        hooks=hooks,
    )
    try:
        yield run
    except BaseException as error:
        hooks.shutdown(run=run, error=error)
        raise
    hooks.shutdown(run=run, error=None)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool,
]  # fmt: skip
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t.reshape(2, 3).t(),
    lambda t: t[0],
    lambda t: t[:0],
    lambda t: t[::2],
    lambda t: t.reshape(1, 2, 3),
]


def _value(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).add(rank).remainder(6).to(dtype)


def _gather_everything() -> None:
    with world() as run:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                mine = layout(_value(run.world.rank, dtype))
                before = mine.clone()
                found = run.hooks.all_gather(run=run, tensor=mine, group=None)
                expected = [layout(_value(rank, dtype)) for rank in range(run.world.size)]
                assert found.dtype == dtype
                assert found.shape == (run.world.size, *mine.shape)
                assert found.tolist() == [tensor.tolist() for tensor in expected]
                assert mine.tolist() == before.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_gather_stacks_any_dtype_and_layout_in_rank_order(worker_pool: Any, ranks: int) -> None:
    worker_pool(ranks).run(_gather_everything)


def _broadcast_everything() -> None:
    with world() as run:
        source = run.world.size - 1
        for dtype in DTYPES:
            for layout in LAYOUTS:
                mine = layout(_value(run.world.rank, dtype))
                before = mine.tolist()
                found = run.hooks.broadcast(run=run, tensor=mine, source=source, group=None)
                assert found.dtype == dtype
                assert found.tolist() == layout(_value(source, dtype)).tolist()
                assert mine.tolist() == before


def test_broadcast_gives_every_rank_a_new_tensor_of_the_sources_values(worker_pool: Any) -> None:
    worker_pool(3).run(_broadcast_everything)


def _reduce(op: str) -> None:
    with world() as run:
        for dtype in DTYPES:
            if (op == "mean" and not (dtype.is_floating_point or dtype.is_complex)) or dtype == torch.bool:
                continue
            if dtype.is_complex and op in ("max", "min"):
                continue
            mine = _value(run.world.rank, dtype)
            before = mine.tolist()
            found = run.hooks.all_reduce(run=run, tensor=mine, op=op, group=None)
            columns = zip(*[_value(rank, dtype).tolist() for rank in range(run.world.size)], strict=True)
            expected = {"sum": sum, "mean": lambda c: sum(c) / len(c), "max": max, "min": min}[op]
            assert found.dtype == dtype
            assert found.tolist() == torch.tensor([expected(column) for column in columns]).to(dtype).tolist()
            assert mine.tolist() == before


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_all_reduce_matches_python_and_leaves_its_argument(worker_pool: Any, op: str) -> None:
    worker_pool(2).run(_reduce, op)


def _reduce_booleans() -> list[Any]:
    with world() as run:
        mine = torch.tensor([True, run.world.rank == 0, False])
        return [run.hooks.all_reduce(run=run, tensor=mine, op=op, group=None).tolist() for op in ("sum", "max", "min")]


def test_booleans_count_as_sum_and_stay_booleans_as_max_and_min(worker_pool: Any) -> None:
    expected = [[2, 1, 0], [True, True, False], [True, False, False]]
    assert worker_pool(2).run(_reduce_booleans) == [expected, expected]


def _half_mean() -> float:
    with world() as run:
        return run.hooks.all_reduce(run=run, tensor=torch.tensor(60000.0).half(), op="mean", group=None).item()


def test_the_mean_of_large_halves_does_not_overflow(worker_pool: Any) -> None:
    assert worker_pool(2).run(_half_mean) == [60000.0, 60000.0]


def _whole_mean() -> None:
    with world() as run, pytest.raises(TypeError, match="int64"):
        run.hooks.all_reduce(run=run, tensor=torch.tensor([1, 2]), op="mean", group=None)


def test_the_mean_of_whole_numbers_is_refused(worker_pool: Any) -> None:
    worker_pool(2).run(_whole_mean)


def _graph() -> bool:
    with world() as run:
        weight = torch.ones(2, requires_grad=True)
        found = [
            run.hooks.all_gather(run=run, tensor=weight * 2, group=None),
            run.hooks.all_reduce(run=run, tensor=weight * 2, op="sum", group=None),
            run.hooks.broadcast(run=run, tensor=weight * 2, source=0, group=None),
        ]
        return any(tensor.requires_grad for tensor in found)


def test_results_are_no_part_of_the_graph(worker_pool: Any) -> None:
    assert worker_pool(2).run(_graph) == [False, False]


def _objects() -> tuple[Any, Any]:
    with world() as run:
        mine = {"rank": run.world.rank}
        return (
            run.hooks.all_gather_object(run=run, value=mine, group=None),
            run.hooks.broadcast_object(run=run, value=None if run.world.rank == 1 else mine, source=1, group=None),
        )


def test_objects_are_gathered_in_rank_order_and_none_can_be_broadcast(worker_pool: Any) -> None:
    gathered = [{"rank": 0}, {"rank": 1}]
    assert worker_pool(2).run(_objects) == [(gathered, None), (gathered, None)]


def _in_group() -> Any:
    with world() as run:
        pairs = [dist.new_group([0, 2]), dist.new_group([1])]
        if run.world.rank == 1:
            return None
        mine = torch.tensor([float(run.world.rank)])
        group = pairs[0]
        return (
            run.hooks.all_gather(run=run, tensor=mine, group=group).flatten().tolist(),
            run.hooks.all_reduce(run=run, tensor=mine, op="mean", group=group).item(),
            run.hooks.broadcast(run=run, tensor=mine, source=2, group=group).item(),
            run.hooks.all_gather_object(run=run, value=run.world.rank, group=group),
        )


def test_a_group_keeps_to_its_ranks_and_sources_are_ranks_of_the_world(worker_pool: Any) -> None:
    expected = ([0.0, 2.0], 1.0, 2.0, [0, 2])
    assert worker_pool(3).run(_in_group) == [expected, None, expected]


# ----------------------------------------------------------------------------------------------------- the world's life


def _place() -> tuple[Any, ...]:
    with world() as run:
        at = run.world
        return at.rank, at.size, at.local_rank, at.local_size, at.data_rank, at.data_size, at.collectives


def test_the_world_is_what_the_launcher_said(worker_pool: Any) -> None:
    assert worker_pool(2).run(_place) == [(0, 2, 0, 2, 0, 2, "gloo"), (1, 2, 1, 2, 1, 2, "gloo")]


def _adopt() -> tuple[int, bool]:
    dist.init_process_group("gloo")
    with world() as run:
        rank = run.world.rank
    return rank, dist.is_initialized()


def test_a_process_group_of_the_user_is_used_and_left(worker_pool: Any) -> None:
    assert worker_pool(2).run(_adopt) == [(0, True), (1, True)]


def _contradict() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(StateConflictError, match="rank 0 of 1.*rank 1 of 2"), world():
        pass


def test_a_process_group_that_contradicts_the_launcher_is_refused(worker_pool: Any) -> None:
    worker_pool(2).run(_only_on_rank_1, "_contradict")


def _only_on_rank_1(name: str) -> None:
    if os.environ["RANK"] == "1":
        globals()[name]()


def _gone() -> bool:
    with world():
        pass
    return dist.is_initialized()


def test_shutdown_destroys_what_was_made(worker_pool: Any) -> None:
    assert worker_pool(2).run(_gone) == [False, False]


def _end_with_an_error_alone() -> float:
    start = time.monotonic()
    if os.environ["RANK"] == "0":
        with pytest.raises(ValueError, match="mine"), world():
            raise ValueError("mine")
        return time.monotonic() - start
    with pytest.raises(CollectiveError), world() as run:
        run.hooks.barrier(run=run, group=None)
    return time.monotonic() - start


def test_shutdown_after_an_error_waits_for_nobody_and_frees_those_who_wait(worker_pool: Any) -> None:
    # The collective timeout is 10 s: both are far below it, since the connection is closed at once.
    assert max(worker_pool(2).run(_end_with_an_error_alone)) < 8


def _late() -> str:
    with pytest.raises(CollectiveError) as caught, world(collective_timeout=1.0) as run:
        _gather_or_sleep(run)
    return str(caught.value)


def _gather_or_sleep(run: Run) -> None:
    if run.world.rank == 1:
        time.sleep(2.5)
    run.hooks.all_gather(run=run, tensor=torch.ones(2), group=None)


def test_a_rank_that_does_not_come_is_an_error_with_collective_rank_and_limit(worker_pool: Any) -> None:
    message = worker_pool(2).run(_late)[0]
    assert "rank 0: all_gather over 2 ranks failed after" in message
    assert "raise collective_timeout (now: 1 s)" in message


def _nobody_to_meet() -> None:
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    with pytest.raises(ConfigError, match="main_process_ip and main_process_port"), world():
        pass


def test_without_an_address_the_error_says_what_to_set(worker_pool: Any) -> None:
    worker_pool(2).run(_nobody_to_meet)


def _meet_by_config() -> int:
    port = int(os.environ.pop("MASTER_PORT"))
    del os.environ["MASTER_ADDR"]
    with world(main_process_ip="127.0.0.1", main_process_port=port) as run:
        return run.world.size


def test_the_configured_address_serves_where_the_launcher_gives_none(worker_pool: Any) -> None:
    assert worker_pool(2).run(_meet_by_config) == [2, 2]


def _never_meet() -> None:
    if os.environ["RANK"] == "1":
        return
    expected = "rank 0 could not form a gloo process group of 2 at 127.0.0.1"
    with pytest.raises(DrivetrainError, match=expected), world(collective_timeout=1.0):
        pass


def test_processes_that_do_not_meet_are_an_error_with_the_address(worker_pool: Any) -> None:
    ranks = worker_pool(2)
    ranks.run(_never_meet)
    assert len(ranks.run(_place)) == 2  # a later try finds the others


def _one_world_after_another() -> list[int]:
    if os.environ["RANK"] == "0":  # the rank that serves the store is the last to leave a world
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda: (time.sleep(0.3), destroy())
    found = []
    try:
        for number in range(3):
            with world(collective_timeout=5.0 + number) as run:
                total = run.hooks.all_reduce(run=run, tensor=torch.tensor(1), op="sum", group=None)
                found.append(int(total))
    finally:
        if os.environ["RANK"] == "0":
            dist.destroy_process_group = destroy
    return found


def test_a_world_may_follow_one_that_another_rank_has_not_left_yet(worker_pool: Any) -> None:
    assert worker_pool(2).run(_one_world_after_another) == [[2, 2, 2]] * 2


# --------------------------------------------------------------------------------------------------------- equal models


def _check_different_models() -> None:
    with world() as run:
        check_same_model(run, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2 + run.world.rank // 2)))


def test_models_that_differ_are_the_same_error_on_all_ranks(worker_pool: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool(3).run(_check_different_models)
    messages = {error.message for error in caught.value.errors}
    assert len(caught.value.errors) == 3
    assert len(messages) == 1
    assert "rank 0 has trainable parameter '1.weight', float32 of shape (2, 2)" in messages.pop()


def _check_more_layers() -> None:
    with world() as run, pytest.raises(CollectiveMismatchError, match=r"rank 0 has nothing more, where rank 1 has"):
        check_same_model(run, nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + run.world.rank)]))


def test_a_layer_too_many_is_named(worker_pool: Any) -> None:
    worker_pool(2).run(_check_more_layers)


def _check_lazy() -> None:
    with world() as run, pytest.raises(DrivetrainError, match=r"'weight' of LazyLinear has no shape yet"):
        check_same_model(run, nn.LazyLinear(2))


def test_a_parameter_without_a_shape_is_named(worker_pool: Any) -> None:
    worker_pool(1).run(_check_lazy)


def _copy() -> tuple[list[float], int]:
    with world() as run:
        model = nn.BatchNorm1d(1)
        nn.init.constant_(model.weight, run.world.rank + 1.0)
        model.num_batches_tracked.fill_(run.world.rank + 5)
        weight = model.weight
        copy_from_first_rank(run, model)
        assert weight is model.weight
        return model.weight.tolist(), model.num_batches_tracked.item()


def test_copy_from_first_rank_takes_parameters_and_buffers_in_place(worker_pool: Any) -> None:
    assert worker_pool(2).run(_copy) == [([1.0], 5), ([1.0], 5)]


# ------------------------------------------------------------------------------------------------------------ lightness


def test_importing_the_package_does_not_import_torch() -> None:
    script = "import sys, drivetrain_backends; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_checks_are_rows_for_the_doctor() -> None:
    rows = list(Ground.checks())
    assert rows[0].name == "torch.distributed"
    assert all(row.ok is not False or row.fix for row in rows)
