"""From a configuration to a run: who gets which device, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator, runtime, state
from drivetrain.config import Resolved, resolve
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.world import Topology


def settings(code: Mapping[str, object] | None = None, **given: object) -> Resolved:
    return resolve(command_line=given, code=code, environment={"DRIVETRAIN_HOME": "/nonexistent"})


def test_processes_get_their_entry_of_gpu_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    from drivetrain.defaults import device

    for local_rank in range(2):
        topology = Topology(local_rank=local_rank, local_size=2)
        device(runtime._assign_device(topology, settings(gpu_ids="3,1").run))
        device(topology)
    assert chosen == [3, 0, 1, 1]
    with pytest.raises(DrivetrainError, match=r"device 7.*there are 4"):
        device(runtime._assign_device(Topology(), settings(gpu_ids="7").run))


def test_fewer_gpu_ids_than_processes_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"1 device\(s\) for 2 processes"):
        runtime.start(settings(gpu_ids="0"), Topology(size=2, local_size=2, launcher="torchrun"))


def test_devices_are_called_as_their_plugin_says() -> None:
    with pytest.raises(ConfigError, match=r"1 CPU process\(s\) for 2 processes"):
        runtime.start(
            settings(gpu_ids="0", device="cpu", backend="ddp"), Topology(size=2, local_size=2, launcher="torchrun")
        )


def test_a_backend_for_one_process_is_refused_for_several() -> None:
    with pytest.raises(DrivetrainError, match=r"this run has 2 processes, but backend 'single' \(command line\)"):
        runtime.start(settings(backend="single"), Topology(size=2, local_size=2, launcher="torchrun"))


def test_a_backend_for_many_runs_without_in_one_process_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = runtime.start(settings(backend="ddp", device="cpu"), Topology())
    assert made.run.names["backend"] == "single"
    assert made.notes == ("one process: running without backend 'ddp' (command line)",)
    made.close()


def test_a_backend_for_many_asked_for_in_code_is_an_error_in_one_process() -> None:
    with pytest.raises(ConfigError, match=r"asked for in code.*drivetrain launch --num_processes"):
        runtime.start(settings(code={"backend": "ddp"}, device="cpu"), Topology())


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "the rank must be below the size"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.from_environment(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1, None)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            (3, 4, 1, 2, "torch.distributed.run"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (1, 2, 1, 2, "Open MPI"),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "6",
                "SLURM_LOCALID": "1",
                "SLURM_NTASKS_PER_NODE": "2(x3)",
                "SLURM_STEP_ID": "0",
            },
            (5, 6, 1, 2, "Slurm"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1, None)),
    ],
    ids=["alone", "torchrun", "mpirun", "srun", "a Slurm allocation without a step"],
)
def test_the_world_is_read_from_the_launchers_environment(environment: dict[str, str], expected: tuple) -> None:
    found = Topology.from_environment(environment)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.launcher) == expected


def test_a_failed_start_leaves_no_run_behind(tmp_path: Path) -> None:
    state.reset()
    with pytest.raises(DrivetrainError):
        state.ensure({"mixed_precision": "fp1024", "device": "cpu"})
    assert state.current() is None


@pytest.mark.usefixtures("fresh_run")
def test_under_another_launcher_nothing_is_said_of_a_world_that_was_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 4\nmixed_precision: no\n")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "DRIVETRAIN_NUM_PROCESSES": "3", "DRIVETRAIN_MIXED_PRECISION": "bf16"}
    for name, value in {**variables, "DRIVETRAIN_CONFIG": str(tmp_path / "c.yaml")}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", logger="drivetrain"):
        Accelerator()
    (line,) = [record.getMessage() for record in caplog.records if "processes=1" in record.getMessage()]
    assert "mixed_precision=bf16 (environment" in line
    assert "num_processes" not in line
