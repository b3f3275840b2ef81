"""What is decided before anything is started: the arithmetic of a launch, environments, and which rank failed first."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import resolve
from drivetrain.errors import ConfigError, DrivetrainError, LaunchError, PluginError
from drivetrain.launch import worker
from drivetrain.launch.elastic import run_folder
from drivetrain.launch.environment import (
    libuv_environment,
    merge_environment,
    rank_environment,
    thread_environment,
    without_other_launchers,
)
from drivetrain.launch.faults import Death, Fault, first_fault, load_fault, save_fault, summary
from drivetrain.launch.functions import function_environment
from drivetrain.launch.plan import LaunchPlan, plan_launch, rendezvous_options
from drivetrain.launch.ports import free_port, port_is_free
from drivetrain.launch.prepare import check_target, prepare


def planned(**settings: object) -> LaunchPlan:
    return plan_launch(resolve(command_line=settings, environment={"DRIVETRAIN_HOME": os.devnull}), "train.py")


SEVERAL = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


# ----------------------------------------------------------------------------------------------------------- arithmetic


def test_processes_are_a_total_shared_out_over_machines():
    plan = planned(num_processes=4, machine_rank=1, **SEVERAL)
    assert (plan.processes, plan.processes_total, plan.first_rank) == (2, 4, 2)


def test_a_total_that_can_not_be_shared_out_names_both_numbers_and_those_that_fit():
    with pytest.raises(ConfigError, match=r"num_processes=5 \(command line\).*num_machines=2.*use 4 or 6"):
        planned(num_processes=5, **SEVERAL)


def test_fewer_processes_than_machines_is_refused_with_one_number_that_fits():
    with pytest.raises(ConfigError, match="use 2$"):
        planned(num_processes=1, **SEVERAL)


@pytest.mark.parametrize("missing", ["main_process_ip", "main_process_port"])
def test_several_machines_need_a_meeting_point(missing: str):
    with pytest.raises(ConfigError, match=f"needs {missing}"):
        planned(num_processes=4, **{key: value for key, value in SEVERAL.items() if key != missing})


def test_port_zero_is_no_meeting_point_for_several_machines_but_a_free_port_for_one():
    with pytest.raises(ConfigError, match="needs main_process_port"):
        planned(num_processes=4, **{**SEVERAL, "main_process_port": 0})
    assert planned(num_processes=4, main_process_port=0).main_process_port is None


def test_restarts_over_several_machines_need_a_rendezvous_that_can_be_joined_again():
    with pytest.raises(ConfigError, match="rdzv_backend: c10d"):
        planned(num_processes=4, max_restarts=1, **SEVERAL)
    assert planned(num_processes=4, max_restarts=1, rdzv_backend="c10d", **SEVERAL).max_restarts == 1


def test_the_number_of_processes_stays_open_if_nobody_gave_one():
    plan = planned()
    assert (plan.processes, plan.processes_total) == (None, None)


def test_a_log_folder_without_a_stream_means_all_streams():
    assert planned(log_dir="logs").tee == "all"
    assert planned(log_dir="logs", tee="stderr").tee == "stderr"
    assert planned().tee == "none"


def test_module_and_no_python_exclude_each_other():
    with pytest.raises(ConfigError, match="exclude each other"):
        plan_launch(resolve(command_line={}, environment={}), "train", module=True, no_python=True)


def test_rendezvous_options_are_pairs():
    assert rendezvous_options(" timeout=30, read_timeout = 5,") == {"timeout": "30", "read_timeout": "5"}
    with pytest.raises(ConfigError, match="'timeout' is no key=value"):
        rendezvous_options("timeout")
    with pytest.raises(ConfigError, match="given twice"):
        rendezvous_options("a=1,a=2")


@given(machines=st.integers(1, 6), each=st.integers(1, 6))
def test_ranks_of_all_machines_together_are_every_number_once(machines: int, each: int):
    world = [rank_environment(local, each, machine, machines) for machine in range(machines) for local in range(each)]
    assert [int(place["RANK"]) for place in world] == list(range(machines * each))
    assert {place["WORLD_SIZE"] for place in world} == {str(machines * each)}


def test_functions_on_the_second_machine_get_the_ranks_after_those_of_the_first():
    world = function_environment(2, node_rank=1, num_nodes=2, address="10.0.0.1", port=29500)
    assert [place["RANK"] for place in world] == ["2", "3"]
    assert [place["LOCAL_RANK"] for place in world] == ["0", "1"]
    assert {(place["WORLD_SIZE"], place["MASTER_ADDR"], place["MASTER_PORT"]) for place in world} == {
        ("4", "10.0.0.1", "29500")
    }


# --------------------------------------------------------------------------------------------------------- environments


def test_threads_are_shared_out_unless_the_user_said_how_many():
    assert thread_environment({}, processes=2, cores=8) == {"OMP_NUM_THREADS": "4"}
    assert thread_environment({}, processes=8, cores=2) == {"OMP_NUM_THREADS": "1"}
    assert thread_environment({"OMP_NUM_THREADS": "3"}, processes=2, cores=8) == {}
    assert thread_environment({}, processes=1, cores=8) == {}


def test_libuv_is_switched_off_only_where_torch_lacks_it_and_the_user_said_nothing():
    assert libuv_environment("win32", {}, lambda: False) == {"USE_LIBUV": "0"}
    assert libuv_environment("win32", {}, lambda: True) == {}
    assert libuv_environment("win32", {"USE_LIBUV": "1"}, lambda: False) == {}
    assert libuv_environment("linux", {}, lambda: pytest.fail("asks torch where it need not")) == {}


def test_variables_of_plugins_are_merged_and_the_users_win():
    wanted = [("a", {"X": "1", "Y": "2"}), ("b", {"Y": "2", "Z": "3"})]
    assert merge_environment(wanted, {"X": "mine"}) == {"Y": "2", "Z": "3"}


def test_two_plugins_that_want_different_values_are_both_named():
    wanted = [("backend 'a' (dist 1)", {"X": "1"}), ("device 'b' (dist 2)", {"X": "2"})]
    with pytest.raises(PluginError, match=r"X: backend 'a' \(dist 1\) wants '1', but device 'b' \(dist 2\) wants '2'"):
        merge_environment(wanted, {})


def test_a_variable_that_is_no_text_names_the_plugin():
    with pytest.raises(PluginError, match="of a: .* got 'X': 1"):
        merge_environment([("a", {"X": 1})], {})  # type: ignore[dict-item]


def test_what_another_agent_told_the_launcher_does_not_reach_a_plain_child():
    assert without_other_launchers({"TORCHELASTIC_USE_AGENT_STORE": "True", "PATH": "p"}) == {"PATH": "p"}


def test_a_port_that_is_listened_on_is_not_free():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        assert not port_is_free(listener.getsockname()[1])
    assert port_is_free(free_port())


# ----------------------------------------------------------------------------------------------------------- the script


def test_a_missing_script_is_an_error_with_the_nearest_name(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    plan = plan_launch(resolve(command_line={}, environment={}), str(tmp_path / "trian.py"))
    with pytest.raises(ConfigError, match=r"no script .*trian\.py.*did you mean .*train\.py"):
        check_target(plan)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("no_such_module_here.train", {"module": True}, "no module 'no_such_module_here'"),
        ("train.py", {"module": True}, "wants the name of a module"),
        ("no-such-program-here", {"no_python": True}, "no program"),
        (".", {}, "folder without a __main__"),
        ("x" * 300, {}, "can't be read: File name too long"),
        ("", {"module": True}, "wants the name of a module"),
        (".train", {"module": True}, "wants the name of a module"),
        ("package..train", {"module": True}, "wants the name of a module"),
    ],
)
def test_what_can_not_be_run_is_found_before_anything_starts(script: str, options: dict[str, bool], message: str):
    plan = plan_launch(resolve(command_line={}, environment={}), script, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        check_target(plan)


def test_a_script_in_a_folder_that_is_closed_to_us_says_so(monkeypatch: pytest.MonkeyPatch):
    def closed(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    plan = plan_launch(resolve(command_line={}, environment={}), "closed/train.py")
    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(ConfigError, match=r"script 'closed/train\.py' can't be read: Permission denied"):
        check_target(plan)


def test_a_script_is_missed_also_where_the_current_folder_has_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for options in ({}, {"module": True}):
        plan = plan_launch(resolve(command_line={}, environment={}), "no_such_module_here", **options)
        with pytest.raises(ConfigError, match="the current folder, which has been removed"):
            check_target(plan)


def test_no_room_for_temporary_files_says_how_to_name_some(monkeypatch: pytest.MonkeyPatch):
    def none(**_: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", none)
    with (
        pytest.raises(DrivetrainError, match=r"no temporary folder can be made: .*; TMPDIR names where"),
        run_folder(),
    ):
        pass


def test_fewer_device_numbers_than_processes_are_refused_before_anything_starts(tmp_path: Path):
    settings = {"num_processes": 2, "backend": "ddp", "device": "cpu", "gpu_ids": "0"}
    resolved = resolve(command_line=settings, environment={"DRIVETRAIN_HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"gpu_ids names 1 CPU process\(s\) for 2 processes on this machine"):
        prepare(resolved, plan_launch(resolved, "train.py"))


def test_no_file_beside_the_worker_hides_a_module_of_pythons_own():
    # The worker runs by its path, so that its folder is searched first for what it imports.
    names = {path.stem for path in Path(worker.__file__).parent.glob("*.py")}
    assert not names & sys.stdlib_module_names


# --------------------------------------------------------------------------------------------------------------- faults


def report(folder: Path, rank: int, time: float, *, pid: int | None = None, kind: str = "ValueError") -> None:
    told = {"rank": rank, "pid": pid or 100 + rank, "host": "here", "time": time, "exit_code": 1, "type": kind}
    told |= {"message": f"of rank {rank}", "place": "train.py:1 in main", "traceback": f"Traceback of rank {rank}"}
    (folder / f"fault-0-{rank}.json").write_text(json.dumps(told))


def death(rank: int, code: int, time: float) -> Death:
    return Death(rank=rank, pid=100 + rank, code=code, time=time)


def test_of_two_ranks_that_raised_the_earlier_report_is_first(tmp_path: Path):
    report(tmp_path, 0, time=10.02)
    report(tmp_path, 1, time=10.01)
    fault = first_fault(tmp_path, 0, [death(0, 1, 10.0), death(1, 1, 10.0)])
    assert (fault.rank, fault.exit_code, fault.traceback) == (1, 1, "Traceback of rank 1")


def test_a_killed_rank_goes_before_a_peer_that_raised_since_the_last_look(tmp_path: Path):
    report(tmp_path, 0, time=10.05)
    fault = first_fault(tmp_path, 0, [death(0, 1, 10.0), death(1, -11, 10.0)])
    assert (fault.rank, fault.signal, fault.exit_code) == (1, "SIGSEGV", 139)


def test_a_rank_that_raised_before_the_last_look_goes_before_one_killed_after_it(tmp_path: Path):
    report(tmp_path, 0, time=9.5)
    fault = first_fault(tmp_path, 0, [death(0, 1, 10.0), death(1, -6, 10.0)])
    assert (fault.rank, fault.type) == (0, "ValueError")


def test_a_rank_that_raised_and_had_to_be_killed_failed_by_what_it_raised(tmp_path: Path):
    report(tmp_path, 0, time=1.0)
    fault = first_fault(tmp_path, 0, [death(0, -9, 10.0)])
    assert (fault.exit_code, fault.signal, fault.message) == (1, None, "of rank 0")


def test_a_report_of_another_process_or_attempt_does_not_count(tmp_path: Path):
    report(tmp_path, 0, time=1.0, pid=4)
    assert first_fault(tmp_path, 0, [death(0, 7, 10.0)]).traceback == ""
    report(tmp_path, 0, time=1.0)
    assert first_fault(tmp_path, 1, [death(0, 7, 10.0)]).traceback == ""


def test_a_report_that_was_cut_off_leaves_the_exit_code(tmp_path: Path):
    (tmp_path / "fault-0-0.json").write_text('{"rank": 0, "pi')
    assert first_fault(tmp_path, 0, [death(0, 7, 10.0)]).exit_code == 7


def test_where_a_killed_interpreter_was_is_shown(tmp_path: Path):
    (tmp_path / "stack-0-0.txt").write_text("Fatal Python error: Segmentation fault\n  File train.py")
    assert "File train.py" in first_fault(tmp_path, 0, [death(0, -11, 10.0)]).what()


def test_a_fault_survives_the_runs_folder(tmp_path: Path):
    assert load_fault(tmp_path) is None
    fault = Fault(rank=1, pid=2, time=3.0, exit_code=4, traceback="ümläut \udcff")
    save_fault(tmp_path, fault)
    assert load_fault(tmp_path) == fault


def test_a_fault_that_was_not_saved_whole_is_none(tmp_path: Path):
    for text in ("", '{"rank": 1', '{"rank": 1}', "[1]"):
        (tmp_path / "first-fault.json").write_text(text)
        assert load_fault(tmp_path) is None


def test_the_summary_names_rank_signal_likely_cause_and_the_others():
    fault = Fault(rank=1, pid=2, time=3.0, exit_code=137, signal="SIGKILL")
    text = summary(fault, size=4, stopped=[0, 2, 3])
    assert "rank 1 of 4 failed first: killed by SIGKILL" in text
    assert "out of memory" in text
    assert "stopped ranks 0, 2, 3" in text
    assert "ended" not in text


def test_the_summary_names_ranks_that_had_left_before():
    fault = Fault(rank=1, pid=2, time=3.0, exit_code=1)
    line = "drivetrain launch: ranks 0, 3 had ended before, with exit code 0; if the others waited for them"
    assert line in summary(fault, size=4, stopped=[2], ended=[0, 3])


def test_the_error_for_callers_in_python_survives_pickling():
    error = pickle.loads(pickle.dumps(LaunchError(1, 7, "exit code 7")))
    assert (error.rank, error.exit_code, str(error)) == (1, 7, "rank 1 failed first: exit code 7")
