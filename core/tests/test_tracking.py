"""Choosing trackers and what they write; on one process. Several are in the workspace's own tests."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch

from drivetrain import Accelerator, ProjectConfiguration, state
from drivetrain.errors import DrivetrainError, PluginError, PluginNotFoundError
from drivetrain.tracking import GeneralTracker, NoTracker, choose
from drivetrain.tracking.jsonl import JsonlTracker
from drivetrain.tracking.tensorboard import TensorBoardTracker


@pytest.fixture(autouse=True)
def _one_run_a_test():
    state.reset()
    yield
    state.reset()


TRACKER = """
from drivetrain.tracking import GeneralTracker
made = []
class Tracker(GeneralTracker):
    name = "fake"
    def start(self):
        made.append((self.run_name, self.options))
    def log(self, values, step=None, **kwargs):
        pass
"""


def install_tracker(site, name="fake", module=TRACKER, **options):
    importable = f"fake_tracker_{name}"
    return site.install(
        f"{name}-dist",
        entry_points={"drivetrain.trackers": {name: f"{importable}:Tracker"}},
        modules={importable: module},
        **options,
    )


# ------------------------------------------------------------------------------------------------------------- choosing


def test_no_tracker_is_the_default():
    assert choose(None, None) == []
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("nothing")
    accelerator.log({"loss": 1.0})
    assert accelerator.trackers == []


def test_an_installed_tracker_is_found_by_name_and_started_once(open_site):
    install_tracker(open_site)
    accelerator = Accelerator(cpu=True, log_with="fake")
    made = sys.modules["fake_tracker_fake"].made
    assert made == []
    accelerator.init_trackers("project", config={"a": 1}, init_kwargs={"fake": {"entity": "me"}})
    assert made == [("project", {"entity": "me"})]
    with pytest.raises(DrivetrainError, match="running already"):
        accelerator.init_trackers("project")
    assert made == [("project", {"entity": "me"})]


def test_its_section_of_the_yaml_gives_options_and_code_wins(open_site, tmp_path):
    install_tracker(open_site)
    file = tmp_path / "config.yaml"
    file.write_text("device: cpu\nfake:\n  entity: yaml\n  mode: offline\n")
    accelerator = Accelerator(log_with="fake", config_file=file)
    accelerator.init_trackers("project", init_kwargs={"fake": {"entity": "code"}})
    assert sys.modules["fake_tracker_fake"].made == [("project", {"entity": "code", "mode": "offline"})]


def test_a_name_that_is_not_installed_is_an_error_with_a_hint(site):
    install_tracker(site)
    with pytest.raises(PluginNotFoundError, match="no tracker 'fkae'; did you mean 'fake'"):
        choose("fkae", None)


def test_a_broken_tracker_is_fatal_by_name_and_left_out_of_all(site, caplog):
    install_tracker(site)
    install_tracker(site, "broken", "raise OSError('no such library')")
    with pytest.raises(PluginError, match="OSError: no such library"):
        choose("broken", None)
    assert [tracker.name for tracker in choose("all", None)] == ["fake"]
    assert "leaves out broken" in caplog.text
    assert "no such library" in caplog.text


def test_a_tracker_that_can_not_start_is_fatal_by_name_and_left_out_of_all(open_site, tmp_path, caplog):
    install_tracker(open_site)
    without_engine = TRACKER.replace('"fake"', '"broken"').replace(
        "made.append", "import no_such_engine_xyz; made.append"
    )
    install_tracker(open_site, "broken", without_engine)
    accelerator = Accelerator(cpu=True, log_with=["broken"])
    with pytest.raises(ImportError, match="no_such_engine_xyz"):
        accelerator.init_trackers("project")
    state.reset()
    accelerator = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    accelerator.init_trackers("project", config={"lr": 0.1})
    assert {"fake", "jsonl"} <= {tracker.name for tracker in accelerator.trackers}
    assert "broken" not in accelerator.log_with
    assert "log_with='all' leaves out broken: ModuleNotFoundError: No module named 'no_such_engine_xyz'" in caplog.text
    accelerator.log({"loss": 1.0})


def test_a_tracker_without_its_engine_is_refused_before_it_starts(site):
    install_tracker(site, module=TRACKER + "    requires = ('an-engine>=3',)\n")
    with pytest.raises(PluginError, match="needs an-engine>=3, which is not installed"):
        choose("fake", None)


@pytest.mark.parametrize(
    ("module", "why"),
    [("class Tracker: pass", "no subclass of GeneralTracker"), ("Tracker = 3", "no class")],
)
def test_something_else_is_no_tracker(site, module, why):
    install_tracker(site, module=module)
    with pytest.raises(PluginError, match=why):
        choose("fake", None)


class Mine(GeneralTracker):
    name = "mine"

    def __init__(self, run_name: str = "given") -> None:
        super().__init__(run_name)
        self.logged: list[Any] = []

    def log(self, values, step=None, **kwargs):
        self.logged.append((values, step))


class Nameless(GeneralTracker):
    pass


def test_objects_and_classes_are_taken_as_they_are():
    mine = Mine()
    accelerator = Accelerator(cpu=True, log_with=[mine])
    accelerator.init_trackers("ignored")
    accelerator.log({"loss": 1.0}, step=2)
    assert mine.logged == [({"loss": 1.0}, 2)]
    assert accelerator.get_tracker("mine") is mine
    assert [tracker.name for tracker in choose(Mine, None)] == ["mine"]


def test_what_is_no_tracker_or_comes_twice_is_an_error():
    with pytest.raises(TypeError, match="got a int"):
        choose([3], None)
    with pytest.raises(TypeError, match="Nameless has no name"):
        choose(Nameless("x"), None)
    with pytest.raises(ValueError, match="'mine' more than once"):
        choose([Mine(), Mine()], None)


def test_a_tracker_of_files_needs_a_directory():
    with pytest.raises(ValueError, match=r"'jsonl' writes files and needs a directory: Accelerator\(project_dir=...\)"):
        choose("jsonl", None)


def test_names_that_were_not_chosen_are_errors():
    accelerator = Accelerator(cpu=True, log_with=Mine)
    with pytest.raises(ValueError, match="init_kwargs has other"):
        accelerator.init_trackers("project", init_kwargs={"other": {}})
    with pytest.raises(DrivetrainError, match="'mine' is not running"):
        accelerator.get_tracker("mine")
    with pytest.raises(ValueError, match="no tracker 'other'"):
        accelerator.get_tracker("other")


def test_one_that_fails_to_end_keeps_nothing_else_from_ending():
    class Failing(Mine):
        name = "failing"

        def finish(self) -> None:
            raise OSError("the service is gone")

    ended = []

    class Ending(Mine):
        name = "ending"

        def finish(self) -> None:
            ended.append(True)

    accelerator = Accelerator(cpu=True, log_with=[Failing(), Ending()])
    accelerator.init_trackers("project")
    with pytest.raises(OSError, match="the service is gone") as caught:
        accelerator.end_training()
    assert "in tracker 'failing'" in str(getattr(caught.value, "__notes__", caught.value))
    assert ended == [True]
    assert state.current() is None


def test_no_tracker_ignores_everything():
    nothing = NoTracker()
    nothing.log({"x": 1})
    nothing.anything.at.all(1, key=2)


# ---------------------------------------------------------------------------------------------------------------- files


def test_jsonl_lines_are_plain_numbers_and_a_second_run_appends(tmp_path):
    for run in range(2):
        tracker = JsonlTracker("run", str(tmp_path))
        tracker.start()
        tensors = {"loss": torch.tensor(0.5), "parts": torch.tensor([1, 2])}
        tracker.log({**tensors, "text": "t", "nested": {"a": 1}}, step=run)
        tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 1]
    assert all(line.pop("time") > 0 for line in lines)
    assert lines == [{"loss": 0.5, "parts": [1, 2], "text": "t", "nested": {"a": 1}}] * 2


def test_jsonl_refuses_what_it_would_lose(tmp_path):
    tracker = JsonlTracker("run", str(tmp_path))
    with pytest.raises(ValueError, match="was not started"):
        tracker.log({"loss": 1.0})
    tracker.start()
    with pytest.raises(ValueError, match="writes step itself"):
        tracker.log({"step": 1.0})
    with pytest.raises(TypeError, match="no further arguments; got commit"):
        tracker.log({"loss": 1.0}, commit=True)


def test_a_project_of_its_own_logging_directory(tmp_path):
    project = ProjectConfiguration(project_dir=tmp_path / "project", logging_dir=tmp_path / "logs")
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_config=project)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    assert (tmp_path / "logs" / "run" / "metrics.jsonl").exists()


class Writer:
    """Stands in for torch's ``SummaryWriter``, whose package is large."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Any] = [("init", args, kwargs)]

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_tensorboard_is_given_each_value_by_its_kind(monkeypatch, tmp_path):
    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    tracker = TensorBoardTracker("run", str(tmp_path), flush_secs=3)
    tracker.start()
    tracker.log({"loss": 0.5, "note": "text", "both": {"a": 1, "b": 2}}, step=7)
    calls = [call for call in tracker.tracker.calls if call[0] != "flush"]
    assert calls == [
        ("init", (str(tmp_path / "run"),), {"flush_secs": 3}),
        ("add_scalar", ("loss", 0.5), {"global_step": 7}),
        ("add_text", ("note", "text"), {"global_step": 7}),
        ("add_scalars", ("both", {"a": 1, "b": 2}), {"global_step": 7}),
    ]


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("PIL")
    tracker = TensorBoardTracker("run", str(tmp_path))
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "layers": [1, 2]})
    tracker.log({"loss": torch.tensor(0.5)}, step=1)
    tracker.log_images({"image": torch.zeros(1, 3, 4, 4)}, step=1)
    tracker.finish()
    assert any(path.name.startswith("events") for path in (tmp_path / "run").iterdir())
