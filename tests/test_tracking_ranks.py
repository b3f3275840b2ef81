"""Trackers on several ranks: who has one, and what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def fake_tracker(everywhere: bool) -> Any:
    from drivetrain.tracking import GeneralTracker

    class Fake(GeneralTracker):
        name = "fake"
        main_process_only = not everywhere

        def __init__(self) -> None:
            super().__init__("none")
            self.calls: list[Any] = []

        def start(self) -> None:
            self.calls.append("start")

        @property
        def tracker(self) -> Any:
            return self.calls

        def store_init_configuration(self, values: Mapping[str, Any]) -> None:
            self.calls.append(dict(values))

        def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.calls.append((dict(values), step, kwargs))

        def finish(self) -> None:
            self.calls.append("finish")

    return Fake()


def track(everywhere: bool) -> Any:
    from drivetrain import Accelerator

    tracker = fake_tracker(everywhere)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"fake": {"commit": True}})
    accelerator.get_tracker("fake").log({"extra": 2.0})
    unwrapped = accelerator.get_tracker("fake", unwrap=True)
    unwrapped.append("by hand")
    accelerator.end_training()
    return tracker.calls


def test_trackers_live_on_the_main_process_and_are_harmless_on_the_others(worker_pool: Any) -> None:
    expected = [
        "start",
        {"lr": 0.1},
        ({"loss": 1.0}, 3, {"commit": True}),
        ({"extra": 2.0}, None, {}),
        "by hand",
        "finish",
    ]
    assert worker_pool(2).run(track, False) == [expected, []]
    assert worker_pool(2).run(track, True) == [expected, expected]


def track_in_a_file(folder: str) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 0.1})
    for step in range(2):
        loss = accelerator.reduce(torch.tensor(accelerator.process_index + step), "mean")
        accelerator.log({"loss": loss}, step=step)
    accelerator.end_training()


def test_the_file_has_one_line_a_step_whatever_the_number_of_ranks(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool(2).run(track_in_a_file, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 0.5), (1, 1.5)]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1}


def track_with_a_tracker_made_first() -> Any:
    from drivetrain import Accelerator
    from drivetrain.tracking import GeneralTracker, on_main_process

    class OfAScript(GeneralTracker):
        name = "of_a_script"

        @on_main_process
        def __init__(self, run_name: str) -> None:
            super().__init__()
            self.lines = [run_name]

        @on_main_process
        def log(self, values: Mapping[str, Any], step: int | None = None) -> None:  # type: ignore[override]
            self.lines.append(f"{step}: {values}")

    tracker = OfAScript("first")
    accelerator = Accelerator(mixed_precision="bf16", log_with=[tracker])
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    return accelerator.mixed_precision, getattr(tracker, "lines", None)


def test_a_tracker_that_is_made_first_decides_nothing_and_lives_on_the_main_process(worker_pool: Any) -> None:
    found = worker_pool(2).run(track_with_a_tracker_made_first, config={"device": "cpu"})
    assert found == [("bf16", ["first", "3: {'loss': 1.0}"]), ("bf16", None)]
