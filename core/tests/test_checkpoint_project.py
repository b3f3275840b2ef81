"""Automatic names: which comes next, which is the last, which go."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from core.tests.checkpoints import check, fill, make
from drivetrain import ProjectConfiguration, state
from drivetrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in (directory / "checkpoints").glob("checkpoint_*"))


def project(tmp_path: Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, **options)


def test_the_oldest_by_number_go_and_the_highest_is_loaded(tmp_path: Path) -> None:
    accelerator, model = make(project_config=project(tmp_path, total_limit=3))
    for value in range(12):
        fill(model, value)
        accelerator.save_state()
    assert numbers(tmp_path) == [9, 10, 11]
    fill(model, -1.0)
    assert accelerator.load_state() == tmp_path / "checkpoints/checkpoint_11"
    assert float(model.weight[0, 0].detach()) == 11.0


def test_numbers_go_on_in_a_new_run_that_loads(tmp_path: Path) -> None:
    accelerator, _ = make(project_config=project(tmp_path))
    accelerator.save_state()
    accelerator.save_state()
    state.reset()
    accelerator, _ = make(project_config=project(tmp_path))
    accelerator.load_state()
    accelerator.save_state()
    assert numbers(tmp_path) == [0, 1, 2]
    accelerator.load_state(tmp_path / "checkpoints/checkpoint_0")
    accelerator.save_state()
    assert numbers(tmp_path) == [0, 1, 2, 3], "numbers are the order in time, whatever was loaded"


def test_a_new_run_does_not_write_over_another_runs_checkpoints(tmp_path: Path) -> None:
    accelerator, model = make(project_config=project(tmp_path))
    fill(model, 1.0)
    accelerator.save_state()
    state.reset()
    accelerator, _ = make(project_config=project(tmp_path))
    with pytest.raises(CheckpointError, match="checkpoint_0 exists already.*load_state"):
        accelerator.save_state()
    assert check(tmp_path / "checkpoints/checkpoint_0") == 1.0


def test_the_limit_never_costs_a_checkpoint_before_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = make(project_config=project(tmp_path, total_limit=1))
    accelerator.save_state()

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match="No space left"):
            accelerator.save_state()
    assert numbers(tmp_path) == [0]
    accelerator.save_state()
    assert numbers(tmp_path) == [1]


def test_what_interrupted_saves_of_lower_numbers_left_goes_with_the_oldest(tmp_path: Path) -> None:
    accelerator, _ = make(project_config=project(tmp_path, total_limit=2))
    left = [tmp_path / "checkpoints" / f".checkpoint_{number}.partial-0123abcd" for number in (0, 1, 2)]
    for directory in left:
        (directory / "models").mkdir(parents=True)
    accelerator.save_state()
    assert [directory.exists() for directory in left] == [True, True, True], "another process may be writing it"
    accelerator.save_state()
    assert [directory.exists() for directory in left] == [False, True, True]
    assert numbers(tmp_path) == [0, 1]


def test_only_complete_checkpoints_with_exact_names_count(tmp_path: Path) -> None:
    accelerator, model = make(project_config=project(tmp_path, total_limit=2))
    fill(model, 1.0)
    accelerator.save_state()
    for name in ("checkpoint_7", "checkpoint_8.bak", "checkpoint_x", "best"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert accelerator.load_state().name == "checkpoint_0"
    accelerator.save_state()
    accelerator.save_state()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"checkpoint_1", "checkpoint_2", "checkpoint_7", "checkpoint_8.bak", "checkpoint_x", "best"}


def test_a_given_directory_wins_over_automatic_names(tmp_path: Path) -> None:
    accelerator, _ = make(project_config=project(tmp_path))
    assert accelerator.save_state(tmp_path / "mine") == tmp_path / "mine"
    assert accelerator.save_iteration == 0


def test_a_relative_project_stays_where_it_was_when_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator, _ = make(project_dir="runs", project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert accelerator.save_state() == tmp_path / "runs/checkpoints/checkpoint_0"
    assert accelerator.load_state() == tmp_path / "runs/checkpoints/checkpoint_0"
    assert accelerator.project_dir == "runs"
    accelerator.project_configuration.project_dir = "."
    assert accelerator.save_state() == tmp_path / "elsewhere/checkpoints/checkpoint_1"


def test_a_number_that_was_chosen_is_not_lowered_by_loading(tmp_path: Path) -> None:
    accelerator, _ = make(project_config=project(tmp_path))
    accelerator.save_state()
    state.reset()
    accelerator, _ = make(project_config=project(tmp_path, iteration=100))
    accelerator.load_state()
    accelerator.save_state()
    assert numbers(tmp_path) == [0, 100]


def test_a_state_is_loaded_by_its_path_before_there_is_a_project(tmp_path: Path) -> None:
    accelerator, model = make(project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    fill(model, 1.0)
    accelerator.save_state(tmp_path / "c")
    fill(model, 0.0)
    accelerator.load_state(tmp_path / "c")
    assert float(model.weight[0, 0].detach()) == 1.0


def test_the_last_one_counts_too_while_it_is_being_replaced(tmp_path: Path) -> None:
    accelerator, model = make(project_config=project(tmp_path))
    for value in (1.0, 2.0):
        fill(model, value)
        accelerator.save_state()
    last = tmp_path / "checkpoints/checkpoint_1"
    last.rename(last.with_name(".checkpoint_1.replaced-01234567"))  # where a crash between the two renames leaves it
    assert accelerator.load_state() == last
    assert float(model.weight[0, 0].detach()) == 2.0


def test_without_a_directory_or_automatic_names_it_says_so(tmp_path: Path) -> None:
    accelerator, _ = make(project_dir=tmp_path)
    for method in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError, match="automatic_checkpoint_naming=True"):
            method()
    accelerator.project_configuration.automatic_checkpoint_naming = True
    with pytest.raises(CheckpointError, match="no complete checkpoint_<number>"):
        accelerator.load_state()


@pytest.mark.parametrize("choices", [{"total_limit": 0}, {"iteration": -1}, {"total_limit": "3"}])
def test_impossible_choices_are_refused(choices: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        ProjectConfiguration(**choices)


def test_the_logging_directory_follows_the_project_unless_it_was_given(tmp_path: Path) -> None:
    assert ProjectConfiguration(project_dir="p").logging_dir == "p"
    assert ProjectConfiguration(project_dir="p", logging_dir="l").logging_dir == "l"
    accelerator, _ = make(project_dir=str(tmp_path))
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
