"""Functions started in processes of their own, as from a notebook."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest

from drivetrain.errors import ConfigError, LaunchError
from drivetrain.launch import debug_launcher, notebook_launcher

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="functions are started by forking")


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DRIVETRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DRIVETRAIN_HOME", str(tmp_path))


def test_a_closure_runs_in_every_process_and_its_results_come_back_by_rank():
    captured = [10]
    before = dict(os.environ)

    def function(add: int) -> tuple[int, int, str]:
        return captured[0] + add + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["LOCAL_RANK"]

    assert notebook_launcher(function, (5,), 2) == [(15, 2, "0"), (16, 2, "1")]
    assert dict(os.environ) == before


def test_the_number_of_processes_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRIVETRAIN_NUM_PROCESSES", "2")
    assert notebook_launcher(lambda: os.environ["RANK"]) == ["0", "1"]


def test_mixed_precision_and_device_reach_the_function_as_settings():
    def function() -> tuple[str, str]:
        from drivetrain.config import resolve

        run = resolve().run
        return run.mixed_precision, run.device

    assert notebook_launcher(function, (), 1, "bf16") == [("bf16", "auto")]
    assert debug_launcher(function) == [("no", "cpu")] * 2


def test_an_exception_ends_all_processes_and_carries_rank_and_traceback():
    def function() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("xyz")
        time.sleep(600)

    with pytest.raises(LaunchError, match=r"(?s)rank 1 failed first.*ValueError: xyz") as caught:
        notebook_launcher(function, num_processes=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (lambda: sys.exit(7), 7, "exit code 7"),
        (lambda: os._exit(8), 8, "exit code 8"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "killed by SIGKILL"),
    ],
)
def test_a_process_that_ends_without_a_word_has_its_code_or_signal(end, code, said):
    with pytest.raises(LaunchError, match=said) as caught:
        notebook_launcher(lambda: end() if os.environ["RANK"] == "0" else time.sleep(600), num_processes=2)
    assert (caught.value.rank, caught.value.exit_code) == (0, code)


def test_a_process_that_ends_itself_well_has_no_result():
    assert notebook_launcher(lambda: sys.exit(0), num_processes=1) == [None]


def test_a_result_larger_than_a_pipe_comes_back():
    assert [len(result) for result in notebook_launcher(lambda: b"x" * 5_000_000, num_processes=2)] == [5_000_000] * 2


def test_a_result_that_can_not_be_pickled_is_none_with_a_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert notebook_launcher(lambda: threading.Lock(), num_processes=1) == [None]
    assert any("rank 0" in str(warning.message) and "can't be sent back" in str(warning.message) for warning in caught)


def test_a_failure_is_tried_again_as_often_as_asked(tmp_path: Path):
    def function() -> str:
        if not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise ValueError("the first time")
        return "done"

    assert notebook_launcher(function, num_processes=1, max_restarts=1) == ["done"]


class FakeAccelerator:
    """Stands for a torch that has used an accelerator in this process."""

    type = "acme"

    def current_accelerator(self) -> FakeAccelerator:
        return self

    def is_initialized(self) -> bool:
        return True


def test_a_process_with_an_initialised_accelerator_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    fake = FakeAccelerator()
    torch = types.SimpleNamespace(accelerator=fake, get_device_module=lambda kind: fake)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ConfigError, match=r"'acme' is already initialised.*inside of the function"):
        notebook_launcher(lambda: None, num_processes=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_nodes": 2}, "needs use_port"),
        ({"num_nodes": 2, "node_rank": 2, "use_port": "29500"}, "node_rank must be below"),
        ({"rdzv_backend": "c10d"}, "rdzv_backend='c10d' is not supported"),
        ({"num_processes": 0}, "at least 1"),
    ],
)
def test_what_can_not_be_had_is_refused_before_anything_starts(arguments, said):
    with pytest.raises(ConfigError, match=said):
        notebook_launcher(lambda: pytest.fail("ran"), **{"num_processes": 2, **arguments})
