"""``drivetrain launch`` with one process: it behaves as Python does, and its command line as documented."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import os, sys
print(sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"])
"""

# What a program can see of how it was started.
SELF = """
from __future__ import annotations
import json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
    "spec": None if __spec__ is None else __spec__.name, "own": vars(main) is globals(),
    "names": sorted(set(globals()) - {"__annotations__", "__cached__"}),  # of the interpreter's own, by version
}))
"""

RAISE = """
def inner():
    raise ValueError("xyz")
try:
    {}["a"]
except KeyError as error:
    inner()
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What Python itself does: the oracle."""
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------------------------------------------- as Python does it


@pytest.mark.parametrize(
    "arguments", [["sub/self.py", "--flag", "a b", ""], ["-m", "sub.self", "x"], ["-m", "sub"]], ids=" ".join
)
def test_a_program_sees_what_it_would_see_under_python(launcher, arguments):
    (launcher.folder / "sub").mkdir()
    (launcher.folder / "sub/__init__.py").touch()
    launcher.script(SELF, "sub/self.py")
    launcher.script(SELF, "sub/__main__.py")
    expected = python(launcher.folder, *arguments)
    assert expected.returncode == 0
    done = launcher.run("--num_processes", "1", *arguments)
    assert (done.returncode, json.loads(done.stdout)) == (0, json.loads(expected.stdout))


def test_a_traceback_is_the_one_python_prints(launcher):
    script = launcher.script(RAISE)
    done = launcher.run("--num_processes", "1", script)
    printed, said = done.stderr.split("drivetrain launch:", 1)
    assert printed == python(launcher.folder, script).stderr
    assert done.returncode == 1
    assert "the process failed: exit code 1" in said
    assert "Traceback" not in said  # it stands just above


def test_a_collective_that_failed_is_told_in_one_traceback(launcher):
    script = launcher.script("""
        from drivetrain.errors import CollectiveError
        try:
            raise RuntimeError("reset by peer")
        except RuntimeError as error:
            raise CollectiveError("all_gather failed: reset by peer") from error
    """)
    done = launcher.run("--num_processes", "1", script)
    assert done.stderr.count("Traceback") == 1
    assert "CollectiveError: all_gather failed: reset by peer" in done.stderr
    assert launcher.run("--num_processes", "1", "--debug", script).stderr.count("Traceback") == 2


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(7)", 7, "exit code 7"),
        ("import sys; sys.exit('enough')", 1, "enough"),
        ("import os; os._exit(9)", 9, "exit code 9"),
        ("import os; os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("def broken(:", 1, "SyntaxError"),
    ],
)
def test_the_exit_code_is_the_scripts_and_a_signal_has_its_name(launcher, text, code, said):
    done = launcher.run("--num_processes", "1", launcher.script(text))
    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.parametrize("text", ["", "import sys; sys.exit()", "import sys; sys.exit(0)"])
def test_a_script_that_ends_well_leaves_no_word(launcher, text):
    done = launcher.run("--num_processes", "1", launcher.script(text))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(launcher.temporary.iterdir()) == []


def test_where_a_segmentation_fault_happened_is_shown(launcher):
    script = launcher.script("""
        import ctypes
        def deep():
            ctypes.string_at(0)
        deep()
    """)
    done = launcher.run("--num_processes", "1", script)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "killed by SIGSEGV" in done.stderr
    assert "in deep" in done.stderr


def test_spawned_processes_find_functions_of_the_script(launcher):
    script = launcher.script("""
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [21]))
    """)
    done = launcher.run("--num_processes", "1", script)
    assert (done.stdout, done.returncode) == ("[42]\n", 0), done.stderr


def test_exit_handlers_run_and_still_find_the_script(launcher):
    script = launcher.script("""
        import atexit, pickle
        class Thing: pass
        atexit.register(lambda: print("at exit", len(pickle.dumps(Thing()))> 0))
        raise SystemExit(3)
    """)
    done = launcher.run("--num_processes", "1", script)
    assert (done.stdout, done.returncode) == ("at exit True\n", 3)


def test_output_arrives_while_the_script_runs(launcher):
    script = launcher.script("""
        import time
        print("started")
        time.sleep(600)
    """)
    process = launcher.start("--num_processes", "1", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"  # else this waits for ever
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).returncode == 128 + signal.SIGTERM


# ---------------------------------------------------------------------------------------------------- being interrupted

SLEEP = """
import os, pathlib, sys, time
pathlib.Path("up-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


def test_an_interrupt_ends_in_one_line_with_the_place_and_exit_code_130(launcher):
    process = launcher.start("--num_processes", "1", launcher.script(SLEEP))
    launcher.wait_for("up-0")
    process.send_signal(signal.SIGINT)
    done = launcher.finish(process)
    assert done.returncode == 130
    (line,) = done.stderr.splitlines()
    assert line.startswith("drivetrain launch: SIGINT: stopped 1 process; rank 0 was at ")
    assert "script.py:4" in line
    assert launcher.leftovers() == []
    assert list(launcher.temporary.iterdir()) == []


def test_a_script_may_save_its_work_when_the_launcher_is_terminated(launcher):
    script = launcher.script("""
        import pathlib, signal, sys, time
        def save(*_):
            time.sleep(0.3)
            pathlib.Path("saved").touch()
            sys.exit(5)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("up").touch()
        while True:
            time.sleep(0.01)
    """)
    process = launcher.start("--num_processes", "1", script)
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).returncode == 143
    assert (launcher.folder / "saved").exists()


def test_a_second_interrupt_does_not_wait_for_a_stubborn_script(launcher):
    script = launcher.script("""
        import pathlib, signal, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: pathlib.Path("asked").touch())
        pathlib.Path("up").touch()
        while True:
            time.sleep(0.01)
    """)
    process = launcher.start("--num_processes", "1", script)
    launcher.wait_for("up")
    process.send_signal(signal.SIGTERM)
    launcher.wait_for("asked")
    process.send_signal(signal.SIGTERM)
    assert launcher.finish(process).returncode == 143
    assert launcher.leftovers() == []


def test_what_a_failed_script_started_is_stopped(launcher):
    script = launcher.script("""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        sys.exit(3)
    """)
    assert launcher.run("--num_processes", "1", script).returncode == 3
    assert launcher.leftovers() == []


# ----------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("spelling", [["--num_processes", "1"], ["--num-processes=1"]])
def test_everything_after_the_script_is_left_alone(launcher, spelling):
    done = launcher.run(*spelling, launcher.script(SHOW), "--num_processes", "9", "--x", "a b", "--", "-m", "--help")
    assert done.stdout == "['--num_processes', '9', '--x', 'a b', '--', '-m', '--help'] 0 1\n", done.stderr


def test_a_misspelt_flag_is_refused_with_the_right_one(launcher):
    done = launcher.run("--num_proceses", "1", launcher.script(SHOW))
    assert done.returncode == 2
    assert "--num_processes" in done.stderr
    assert done.stdout == ""


def test_a_backend_that_is_not_installed_is_refused_by_its_flag_too(launcher):
    done = launcher.run("--use_sindle", launcher.script(SHOW))
    assert done.returncode == 2
    assert "did you mean 'single'" in done.stderr


@pytest.mark.parametrize("flags", [["--use_single"], ["--use-single"], ["--backend", "single"]])
def test_the_flag_of_a_backend_chooses_it(launcher, flags):
    done = launcher.run(*flags, "--num_processes", "1", "--dry_run", launcher.script(SHOW))
    assert done.returncode == 0, done.stderr
    assert "backend 'single'" in done.stdout


def test_flags_that_contradict_each_other_are_refused(launcher):
    done = launcher.run("--cpu", "--device", "torch", launcher.script(SHOW))
    assert done.returncode == 2
    assert "--device (torch) and --cpu (cpu) contradict each other" in done.stderr


def test_several_processes_for_a_backend_of_one_are_refused_before_anything_starts(launcher):
    done = launcher.run("--backend", "single", "--num_processes", "2", launcher.script(SHOW))
    assert (done.returncode, done.stdout) == (2, "")
    assert "num_processes=2 (command line), but backend 'single' (command line) works with one" in done.stderr


def test_a_missing_script_is_one_clear_line(launcher):
    done = launcher.run("--num_processes", "2", "nowhere/train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no script 'nowhere/train.py'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_before_anything_starts(launcher):
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = launcher.run("--num_processes", "1", "--main_process_port", str(port), launcher.script(SHOW))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"main_process_port={port} is in use" in done.stderr


def test_a_program_runs_as_it_is(launcher):
    done = launcher.run("--num_processes", "1", "--no_python", "sh", "-c", "echo $RANK $1; exit 4", "sh", "--x")
    assert (done.stdout, done.returncode) == ("0 --x\n", 4)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--num_processes", "1"], ["--num_processes", "2"]], ids=" ".join)
def test_a_program_that_the_system_can_not_start_is_one_line(launcher, flags):
    program = launcher.folder / "program"
    program.write_text("echo no interpreter is named\n")
    program.chmod(0o755)
    done = launcher.run(*flags, "--no_python", "./program")
    said = "Error: the processes can't be started: [Errno 8] Exec format error: './program'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    assert launcher.leftovers() == []


@pytest.mark.slow
def test_a_launcher_whose_output_is_closed_still_tells_of_a_failure(launcher):
    script = launcher.script("raise SystemExit(7)")
    command = [sys.executable, "-m", "drivetrain", "launch", "--num_processes", "1", script]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        cwd=launcher.folder,
        env=launcher.environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7
    assert done.stderr.startswith("drivetrain launch: the process failed: exit code 7")


def test_a_dry_run_of_very_many_ranks_shows_the_first_of_them(launcher):
    done = launcher.run("--num_processes", "1000000", "--backend", "ddp", "--cpu", "--dry_run", launcher.script(""))
    assert (done.returncode, "999936 more ranks" in done.stdout) == (0, True)


def test_flags_beat_the_environment_which_beats_the_file(launcher):
    (launcher.folder / "run.yaml").write_text("mixed_precision: bf16\nnum_processes: 2\nlog_level: error\n")
    launcher.environment["DRIVETRAIN_LOG_LEVEL"] = "debug"
    script = launcher.script("""
        from drivetrain.config import resolve
        resolved = resolve()
        print(resolved.run.mixed_precision, resolved.run.num_processes, resolved.run.log_level)
        print(resolved.origin("mixed_precision"), "|", resolved.origin("log_level"))
        import os, sys
        assert "torch" not in sys.modules
        assert [name for name in os.environ if name.startswith("DRIVETRAIN_R")] == ["DRIVETRAIN_RESOLVED"]
    """)
    done = launcher.run("--config", "run.yaml", "--mixed_precision", "no", "--num_processes=1", "--cpu", script)
    assert done.stdout == "no 1 debug\ncommand line | environment DRIVETRAIN_LOG_LEVEL\n", done.stderr
    assert sorted(path.name for path in launcher.folder.iterdir()) == ["home", "run.yaml", "script.py", "tmp"]


def test_a_dry_run_shows_ranks_and_origins_and_starts_nothing(launcher):
    (launcher.folder / "run.yaml").write_text("num_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n")
    flags = ["--num_processes", "4", "--main_process_port", "29500", "--multi_gpu", "--cpu", "--dry_run"]
    done = launcher.run("--config_file", "run.yaml", *flags, launcher.script("open('ran', 'w')"), "--lr", "1 2")
    assert done.returncode == 0, done.stderr
    assert "2 on this machine (ranks 2 to 3), 4 in total" in done.stdout
    assert "script.py --lr '1 2'" in done.stdout
    assert "run.yaml:2" in done.stdout
    assert "--multi_gpu is accepted and changes nothing" in done.stderr
    assert not (launcher.folder / "ran").exists()


def test_a_rank_that_launches_another_run_does_not_hand_on_its_settings(launcher):
    launcher.script(SHOW, "inner.py")
    script = launcher.script("""
        import subprocess, sys
        flags = ["--cpu", "--num_processes", "1"]
        subprocess.run([sys.executable, "-m", "drivetrain", "launch", *flags, "inner.py"], check=True)
    """)
    done = launcher.run("--num_processes", "1", "--set", "mixed_precision=no", script)
    assert (done.stdout, done.returncode) == ("[] 0 1\n", 0), done.stderr


# -------------------------------------------------------------------------------------------------------------- plugins

PLUGIN = """
from drivetrain.plugin import Backend, Capabilities, hookimpl

class Acme(Backend):
    api = (1, 0)
    capabilities = Capabilities(many_processes=True)

    @hookimpl
    def process_count(self, plan):
        assert plan.processes is None
        return 3

    @hookimpl
    def launch_environment(self, plan):
        return {"ACME_RANKS": str(plan.processes), "ACME_MINE": "plugin"}

    @hookimpl
    def launch(self, plan):
        print("acme starts", plan.script, plan.processes, plan.environment)
        open(plan.resolved_config).close()
        return 6
"""


def test_a_plugin_may_count_the_processes_set_their_environment_and_start_them(launcher):
    launcher.script(PLUGIN, "acme_plugin.py")
    metadata = launcher.folder / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[drivetrain.backends]\nacme = acme_plugin:Acme\n")
    launcher.environment |= {"PYTHONPATH": str(launcher.folder), "ACME_MINE": "user"}
    done = launcher.run("--use_acme", "--cpu", launcher.script(SHOW))
    assert done.stdout == "acme starts script.py 3 {'ACME_RANKS': '3'}\n", done.stderr
    assert done.returncode == 6
