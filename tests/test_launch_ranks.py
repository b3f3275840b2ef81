"""``drivetrain launch`` with several processes: how they start, and that one failure ends all of them well.

Most scripts here import nothing heavy, since the launcher's own agent takes its time already.
"""

from __future__ import annotations

import os
import signal
import textwrap

import psutil
import pytest

# Each starts several processes with torch. What a launch of one does is in test_launch.py.
pytestmark = pytest.mark.slow

WORLD = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
print(*(os.environ.get(name) for name in names))
"""

# Rank 0 starts a process of its own, and is as deaf to SIGTERM as that. Then each says that it is up.
UP = """
import os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
if rank == "0":
    signal.signal(signal.SIGTERM, signal.HOW)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.HOW); time.sleep(600)"],
                     start_new_session=True)
pathlib.Path("up-" + rank).touch()
while not all(pathlib.Path(name).exists() for name in ("up-0", "up-1")):
    time.sleep(0.01)
"""
DEAF = UP.replace("HOW", "SIG_IGN")
WAIT = UP.replace("HOW", "SIG_DFL") + "time.sleep(600)\n"


def two(launcher, script, *arguments, flags=()):
    return launcher.run("--cpu", "--num_processes", "2", *flags, script, *arguments)


@pytest.mark.slow
def test_two_jobs_at_once_have_two_ranks_each_and_do_not_meet(launcher):
    script = launcher.script(WORLD)
    jobs = [launcher.start("--cpu", "--num_processes=2", *port, script) for port in ([], ["--main_process_port", "0"])]
    threads = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else None
    for done in map(launcher.finish, jobs):
        assert done.returncode == 0, done.stderr
        lines = sorted(line.split() for line in done.stdout.splitlines())
        assert [line[:4] for line in lines] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
        assert {line[5] for line in lines} == {"127.0.0.1"}
        if threads is not None:
            assert {line[4] for line in lines} == {str(threads)}
        assert done.stderr == ""
    assert list(launcher.temporary.iterdir()) == []


@pytest.mark.slow
def test_one_rank_that_exits_ends_a_deaf_one_and_its_children(launcher):
    script = launcher.script(DEAF + "sys.exit(7) if rank == '1' else time.sleep(600)\n")
    done = two(launcher, script)
    assert done.returncode == 7
    first, last = done.stderr.splitlines()
    assert first == "drivetrain launch: stopped rank 0"
    assert last.startswith("drivetrain launch: rank 1 of 2 failed first: exit code 7 (pid ")
    assert launcher.leftovers() == []
    assert list(launcher.temporary.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_left_early_is_named_when_the_others_fail(launcher):
    script = launcher.script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit()
        time.sleep(1)  # as long as the launcher needs to see that the other one is gone
        raise RuntimeError("connection closed by peer")
    """)
    done = two(launcher, script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "drivetrain launch: rank 1 had ended before, with exit code 0; if the others waited for it, the cause is there"
    )


@pytest.mark.slow
def test_only_the_first_traceback_is_shown_at_the_end_with_its_notes(launcher):
    script = launcher.script("""
        import os, pathlib, time
        if os.environ["RANK"] == "1":
            error = ValueError("xyz")
            error.add_note("a note") if hasattr(error, "add_note") else None
            raise error
        folder = pathlib.Path(os.environ["DRIVETRAIN_RESOLVED"]).parent
        while not list(folder.glob("fault-*.json")):
            time.sleep(0.001)
        raise RuntimeError("connection closed by peer")
    """)
    done = two(launcher, script)
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("drivetrain launch: rank 1 of 2 failed first: exit code 1") :]
    words = ["  ValueError: xyz", "  a note"] if hasattr(ValueError, "add_note") else ["  ValueError: xyz"]
    assert last.splitlines()[-len(words) :] == words
    assert "connection closed" not in last
    assert "ChildFailedError" not in done.stderr


@pytest.mark.slow
def test_a_wrong_setting_ends_in_its_message_below_the_line_of_the_script(launcher):
    script = launcher.script("""
        from drivetrain.config import resolve
        resolve(code={"mixed_precison": "bf16"})
    """)
    done = two(launcher, script)
    told = done.stderr[done.stderr.index("failed first") :].splitlines()
    message = "Accelerator(...): mixed_precison: unknown key; did you mean 'mixed_precision'?"
    assert [line for line in told[1:] if "^" not in line] == [
        "  Traceback (most recent call last):",
        f'    File "{launcher.folder / script}", line 3, in <module>',
        '      resolve(code={"mixed_precison": "bf16"})',
        f"  drivetrain.errors.ConfigError: {message}",
    ]
    whole = launcher.run("--num_processes", "1", "--debug", script).stderr
    assert "in resolve" in whole


@pytest.mark.slow
def test_of_ranks_that_fail_alike_one_prints_its_traceback(launcher):
    script = launcher.script("""
        import os, pathlib, time
        folder = pathlib.Path(os.environ["DRIVETRAIN_RESOLVED"]).parent
        while os.environ["RANK"] == "1" and not list(folder.glob("fault-*.json")):
            time.sleep(0.001)
        raise ValueError("xyz")
    """)
    done = two(launcher, script)
    assert "drivetrain launch: rank 0 of 2 failed first: exit code 1" in done.stderr
    assert done.stderr.splitlines()[-1] == "  ValueError: xyz"
    assert done.stderr.count("Traceback") == 2  # of rank 0, and once more at the end


@pytest.mark.slow
def test_a_rank_that_failed_first_is_named_though_it_ends_last(launcher):
    script = launcher.script("""
        import atexit, os, pathlib, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 600)
            raise ValueError("xyz")
        folder = pathlib.Path(os.environ["DRIVETRAIN_RESOLVED"]).parent
        while not list(folder.glob("fault-*.json")):
            time.sleep(0.001)
        raise RuntimeError("connection closed by peer")
    """)
    done = two(launcher, script)
    assert done.returncode == 1
    assert "drivetrain launch: rank 1 of 2 failed first: exit code 1" in done.stderr
    assert "ValueError: xyz" in done.stderr


def test_a_killed_rank_is_named_with_its_signal(launcher):
    script = launcher.script("""
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """)
    done = two(launcher, script)
    assert done.returncode == 137
    assert "rank 1 of 2 failed first: killed by SIGKILL" in done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_but_hangs_at_its_end_does_not_hold_the_others(launcher):
    script = launcher.script("""
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("xyz")
        time.sleep(600)
    """)
    done = two(launcher, script)
    assert done.returncode == 1
    assert "rank 1 of 2 failed first: exit code 1" in done.stderr


def test_an_interrupt_stops_all_ranks_in_one_line(launcher):
    script = launcher.script(WAIT)
    process = launcher.start("--cpu", "--num_processes", "2", script)
    launcher.wait_for("up-0", "up-1")
    process.send_signal(signal.SIGINT)
    done = launcher.finish(process)
    assert done.returncode == 130
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("drivetrain launch: SIGINT: stopped 2 processes")
    assert launcher.leftovers() == []
    assert list(launcher.temporary.iterdir()) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL") or os.uname().sysname != "Linux", reason="asks Linux's kernel")
def test_ranks_end_with_a_launcher_that_was_killed(launcher):
    script = launcher.script(WAIT)
    process = launcher.start("--cpu", "--num_processes", "2", script)
    launcher.wait_for("up-0", "up-1")
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.kill()
    psutil.wait_procs(ranks, timeout=20)
    assert [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE] == []


def test_all_ranks_start_again_after_a_failure(launcher):
    script = launcher.script("""
        import os, sys, time
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        print("attempt", attempt, "rank", rank)
        if attempt == "0":
            sys.exit(7) if rank == "1" else time.sleep(600)
    """)
    done = two(launcher, script, flags=["--max_restarts", "2"])
    assert done.returncode == 0, done.stderr
    assert {"attempt 1 rank 0", "attempt 1 rank 1"} <= set(done.stdout.splitlines())
    assert done.stderr == "drivetrain launch: rank 1 failed (exit code 7); restart 1 of 2\n"


@pytest.mark.slow
def test_when_restarts_are_used_up_the_last_failure_counts(launcher):
    script = launcher.script("""
        import os, sys
        sys.exit(10 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    """)
    done = launcher.run("--num_processes", "1", "--max_restarts", "1", script)
    assert done.returncode == 11
    assert "restart 1 of 1" in done.stderr


@pytest.mark.slow
def test_output_is_copied_to_a_file_for_each_rank(launcher):
    script = launcher.script("""
        import os, sys
        print("out", os.environ["RANK"])
        print("err", os.environ["RANK"], file=sys.stderr)
        if os.environ["RANK"] == "1": raise SystemExit(3)
    """)
    done = two(launcher, script, flags=["--tee", "3", "--log_dir", "logs"])
    assert done.returncode == 3
    assert "[rank 1] out 1" in done.stdout
    assert "[rank 1] err 1" in done.stderr
    (folder,) = (launcher.folder / "logs").iterdir()
    assert f"the output of each rank is in logs{os.sep}{folder.name}" in done.stderr
    assert (folder / "attempt_0/1/stdout.log").read_text() == "out 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_different_ranks_do_not_mix(launcher, unbuffered):
    launcher.environment["PYTHONUNBUFFERED"] = unbuffered
    script = launcher.script("""
        import os, sys
        for _ in range(300):
            print(*[os.environ["RANK"]] * 50)
            print(*[os.environ["RANK"]] * 50, file=sys.stderr)
    """)
    done = two(launcher, script)
    assert sorted(set(done.stderr.splitlines())) == [" ".join([rank] * 50) for rank in "01"]
    assert sorted(set(done.stdout.splitlines())) == [" ".join([rank] * 50) for rank in "01"]


def test_a_launch_from_python_raises_the_childs_error_with_its_rank(launcher):
    launcher.script("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("xyz")
        time.sleep(600)
    """)
    caller = launcher.script(
        """
        import os, signal
        from drivetrain.launch import LaunchError, launch_script
        before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
        try:
            launch_script("script.py", num_processes=2, device="cpu", settings={"max_restarts": 1}, quiet=True)
        except LaunchError as error:
            assert "xyz" in str(error) and "rank 1" in str(error), str(error)
            print(error.rank, error.exit_code)
        assert dict(os.environ) == before
        assert signal.getsignal(signal.SIGTERM) == handler
        """,
        "caller.py",
    )
    done = launcher.run("--num_processes", "1", caller)
    assert (done.stdout, done.returncode) == ("1 1\n", 0), done.stderr


# ---------------------------------------------------------------------------------------------- with torch in the ranks

GLOO = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item())
"""


@pytest.mark.slow
def test_ranks_reach_each_other_also_after_a_restart(launcher):
    script = launcher.script(
        GLOO + 'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1: os._exit(9)\n'
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    done = two(launcher, script, flags=["--max_restarts", "1"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 4


@pytest.mark.slow
def test_a_rank_that_leaves_others_in_a_barrier_ends_them(launcher):
    script = launcher.script(
        GLOO
        + textwrap.dedent("""
        if dist.get_rank() == 1:
            sys.exit(7)
        dist.barrier()
    """)
    )
    done = two(launcher, script)
    assert done.returncode == 7
    assert "rank 1 of 2 failed first: exit code 7" in done.stderr
    assert launcher.leftovers() == []


@pytest.mark.slow
def test_two_machines_meet_at_the_address_given(launcher):
    from drivetrain.launch.ports import free_port

    script = launcher.script(GLOO + "dist.destroy_process_group()\nprint('rank', os.environ['RANK'])\n")
    flags = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", str(free_port())]
    machines = [launcher.start(*flags, "--machine_rank", str(rank), script) for rank in (0, 1)]
    for rank, done in enumerate(map(launcher.finish, machines)):
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"sum 3.0\nrank {rank}\n"
