"""The worker pool: how results, errors and late ranks come back, and that nothing is left behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import attrs
import psutil
import pytest

from drivetrain.testing.pool import WorkerError, WorkerPool


@attrs.frozen
class Place:
    rank: int
    size: int


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as made:
        yield made


def _place(offset: int = 0) -> Place:
    return Place(int(os.environ["RANK"]) + offset, int(os.environ["WORLD_SIZE"]))


def test_results_come_back_in_rank_order(pool: WorkerPool) -> None:
    assert pool.run(_place, 10) == [Place(10, 2), Place(11, 2)]


def test_a_part_of_the_pool_is_a_world_of_its_own(pool: WorkerPool) -> None:
    assert pool.run(_place, size=1) == [Place(0, 1)]


def test_more_ranks_than_workers_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="has 2 workers, and 3"):
        pool.run(_place, size=3)


def _fail_on_last() -> str:
    if _place().rank == 1:
        raise KeyError("no such thing")
    return "fine"


def test_an_exception_names_rank_type_and_line(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fail_on_last)
    (error,) = caught.value.errors
    assert (error.rank, error.type, error.message) == (1, "builtins.KeyError", "'no such thing'")
    assert "_fail_on_last" in error.traceback
    assert "rank 1" in str(caught.value)
    assert caught.value.of(1) is error
    with pytest.raises(LookupError, match="rank 0"):
        caught.value.of(0)


def _fail_everywhere() -> None:
    raise ValueError(f"from rank {_place().rank}")


def test_the_errors_of_all_ranks_are_kept(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fail_everywhere)
    assert [caught.value.of(rank).message for rank in (0, 1)] == ["from rank 0", "from rank 1"]


def _fail_late_on_first() -> None:
    time.sleep(0.0 if _place().rank == 1 else 0.3)
    raise ValueError


def test_the_first_error_stands_in_front(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fail_late_on_first)
    assert [error.rank for error in caught.value.errors] == [1, 0]


def _exit() -> None:
    sys.exit(3)


def test_sys_exit_is_an_error_and_not_the_end_of_the_worker(pool: WorkerPool) -> None:
    before = pool.run(os.getpid)
    with pytest.raises(WorkerError, match="SystemExit"):
        pool.run(_exit)
    assert pool.run(os.getpid) == before


def _unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        pool.run(_unpicklable)


def test_a_function_inside_a_function_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="top level"):
        pool.run(lambda: None)


def _dirty() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(os.path.dirname(os.getcwd()))
    warnings.simplefilter("error")
    random.random()


def _look() -> tuple[str | None, str, int, float]:
    return os.environ.get("LEFT_BEHIND"), os.getcwd(), len(warnings.filters), random.random()


def test_a_task_leaves_no_trace_for_the_next(pool: WorkerPool) -> None:
    before = pool.run(_look)
    pool.run(_dirty)
    assert pool.run(_look) == before


def _settings() -> tuple[str | None, str]:
    with open(os.environ["DRIVETRAIN_CONFIG"]) as file:
        return os.environ.get("EXTRA"), file.read()


def test_config_and_environment_reach_the_task(pool: WorkerPool) -> None:
    for extra, text in pool.run(_settings, config={"mixed_precision": "bf16"}, environment={"EXTRA": "yes"}):
        assert extra == "yes"
        assert '"mixed_precision": "bf16"' in text
        assert '"collective_timeout": 15' in text


def _port() -> int:
    return int(os.environ["MASTER_PORT"])


def test_every_task_meets_at_a_port_of_its_own(pool: WorkerPool) -> None:
    first, second = pool.run(_port), pool.run(_port)
    assert first[0] == first[1]
    assert second[0] == second[1] != first[0]


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def test_process_groups_are_made_anew_for_every_task(pool: WorkerPool) -> None:
    assert pool.run(_sum_of_ranks) == [3.0, 3.0]
    assert pool.run(_sum_of_ranks) == [3.0, 3.0]


def _stuck_on_last() -> None:
    if _place().rank == 1:
        _wait_here_for_ever()


def _wait_here_for_ever() -> None:
    time.sleep(600)


def test_a_late_rank_is_shown_with_its_stack_and_replaced(pool: WorkerPool) -> None:
    before = pool.run(os.getpid)
    with pytest.raises(TimeoutError, match=r"ranks \[1\]") as caught:
        pool.run(_stuck_on_last, timeout=1)
    assert "_wait_here_for_ever" in str(caught.value)
    assert not set(pool.run(os.getpid)) & set(before)


def _die_on_last() -> None:
    if _place().rank == 1:
        print("last words", flush=True)
        os._exit(5)


def test_a_process_that_ends_is_reported_with_its_output_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="exit code 5") as caught:
        pool.run(_die_on_last)
    assert "last words" in caught.value.of(1).traceback
    assert [place.rank for place in pool.run(_place)] == [0, 1]


def _wait_for_a_rank_that_failed() -> None:
    if _place().rank == 0:
        raise ValueError("first")
    _wait_here_for_ever()


def test_ranks_that_wait_for_a_failed_one_are_ended(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="ValueError: first"):
        pool.run(_wait_for_a_rank_that_failed, timeout=60)
    assert [place.rank for place in pool.run(_place)] == [0, 1]


def _start_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_close_leaves_no_process_not_even_of_tasks() -> None:
    with WorkerPool(1) as pool:
        pids = [*pool.run(_start_child), *pool.run(os.getpid)]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not [pid for pid in pids if _runs(pid)]
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(_place)


@pytest.mark.slow
def test_workers_and_what_forked_them_end_when_the_parent_is_killed() -> None:
    script = (
        "import os, time\n"
        "from drivetrain.testing.pool import WorkerPool\n"
        "pool = WorkerPool(1)\n"
        "print(*pool.run(os.getpid), *pool.run(os.getppid), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _runs(pid)]


# ------------------------------------------------------------------------------------------------------------- forking


def _variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


forks = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@forks
def test_a_pool_beside_another_forks_from_the_same_processes() -> None:
    with WorkerPool(2) as first:
        with WorkerPool(2) as second:
            assert second.run(os.getppid) == first.run(os.getppid)
            assert not set(second.run(os.getpid)) & set(first.run(os.getpid))
        assert first.run(_place) == [Place(0, 2), Place(1, 2)]


def _hash() -> int:
    return hash("the order of a set of texts depends on this")


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="PYTHONHASHSEED is set")
def test_ranks_hash_text_differently(pool: WorkerPool) -> None:
    first, second = pool.run(_hash)
    assert first != second


@pytest.mark.slow
def test_a_worker_starts_with_the_variables_of_its_pool(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THIS_PROCESS", "yes")
    with WorkerPool(1, {"OF_THE_POOL": "yes"}) as other:
        assert other.run(_variables, "FROM_THIS_PROCESS", "OF_THE_POOL") == [["yes", "yes"]]
    assert pool.run(_variables, "FROM_THIS_PROCESS", "OF_THE_POOL", size=1) == [[None, None]]


@forks
@pytest.mark.slow
@pytest.mark.parametrize(
    "spoilt",
    ["threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "sys.exit(3)"],
    ids=["it has threads", "it ends"],
)
def test_a_process_that_can_not_fork_safely_leaves_workers_to_start_anew(tmp_path: Path, spoilt: str) -> None:
    in_server = "'drivetrain.testing.fork_server' in sys.orig_argv"
    (tmp_path / "sitecustomize.py").write_text(f"import sys, threading, time\nif {in_server}: {spoilt}\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with WorkerPool(1, {"PYTHONPATH": path}) as pool:
        assert pool.run(os.getppid) == [os.getpid()]
        assert pool.run(_place) == [Place(0, 1)]


def test_the_parent_does_not_import_torch() -> None:
    script = "import sys, drivetrain.testing.pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_PROGRAM = """
import attrs, os
from drivetrain.testing.pool import WorkerPool

@attrs.frozen
class Box:
    value: int

def add(box):
    return Box(box.value + int(os.environ["WORLD_SIZE"]))

if __name__ == "__main__":
    with WorkerPool(1) as pool:
        print(pool.run(add, Box(3)))
"""


@pytest.mark.slow
def test_a_program_may_have_its_own_functions_run(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[Box(value=4)]\n", done.stderr
