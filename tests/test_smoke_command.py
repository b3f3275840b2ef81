"""``drivetrain test``: it passes where the world is right, and fails where it is not what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.installed import backends_for_many

PLUGIN = """
    import os, subprocess, sys
    from drivetrain.plugin import Backend, Capabilities, hookimpl

    class Lone(Backend):
        '''Says that it starts many, and starts one.'''
        api = (1, 0)

        @property
        def capabilities(self):
            return Capabilities(distributed_type="LONE", many_processes=True)

        @hookimpl
        def launch(self, plan):
            environment = {**os.environ, "DRIVETRAIN_RESOLVED": plan.resolved_config}
            return subprocess.call([sys.executable, "-m", plan.script, *plan.script_args], env=environment)

    class Lazy(Backend):
        '''Says that it updates, and does not.'''
        api = (1, 0)

        @hookimpl
        def step(self, optimizer):
            return True

    class Broken(Backend):
        '''Breaks in the middle.'''
        api = (1, 0)

        @hookimpl
        def broadcast_object(self, value):
            raise OSError("the network is gone")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds a distribution with three bad backends."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "bad_backends.py").write_text(textwrap.dedent(PLUGIN))
    info = folder / "bad_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-backends\nVersion: 1.0\n")
    points = [f"{name.lower()} = bad_backends:{name}" for name in ("Lone", "Lazy", "Broken")]
    (info / "entry_points.txt").write_text("[drivetrain.backends]\n" + "\n".join(points) + "\n")
    return folder


def run(folder: Path, *arguments: str, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRIVETRAIN_")}
    environment |= {"DRIVETRAIN_HOME": str(folder), **({} if site is None else {"PYTHONPATH": str(site)})}
    return subprocess.run(
        [sys.executable, "-m", "drivetrain", "test", "--cpu", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Result and finding by name of the check."""
    found = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) == 3:
            found[cells[0]] = (cells[1], cells[2])
    return found


@pytest.mark.slow
def test_two_processes_in_half_precision_are_what_was_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, "--num_processes", "2", "--mixed_precision", "bf16", "--set", "collective_timeout=20")
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(done.stdout)
    assert found["processes"] == ("ok", "2")
    assert found["ranks"] == ("ok", "[0, 1]")
    assert found["precision"] == ("ok", "bf16")
    assert {result for result, _ in found.values()} <= {"ok", "result"}
    assert {"gather", "reduce", "broadcast", "objects", "data", "save and load"} <= set(found)
    assert "This world works: 2 process(es), backend ddp, cpu, mixed_precision bf16." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends_for_many())
def test_every_installed_backend_for_several_processes_passes(tmp_path: Path, backend: str) -> None:
    done = run(tmp_path, "--num_processes", "2", "--backend", backend, "--set", "collective_timeout=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(done.stdout)["training, against one process"][0] == "ok"
    assert f"This world works: 2 process(es), backend {backend}, cpu, mixed_precision no." in done.stdout


@pytest.mark.slow
def test_a_world_of_another_size_fails_though_all_in_it_is_well(tmp_path: Path, site: Path) -> None:
    done = run(tmp_path, "--num_processes", "3", "--backend", "lone", site=site)
    assert done.returncode == 1
    found = rows(done.stdout)
    assert found["processes"] == ("BAD", "1, but 3 was asked for")
    assert found["training, against one process"][0] == "ok"
    assert "This world does not work; wrong: processes, ranks." in done.stderr


@pytest.mark.slow
def test_a_backend_that_does_not_train_fails(tmp_path: Path, site: Path) -> None:
    done = run(tmp_path, "--num_processes", "1", "--backend", "lazy", site=site)
    assert done.returncode == 1
    found = rows(done.stdout)
    assert found["training, against one process"][0] == "BAD"
    assert "rank 0: weights deviate by 1.0e+00 of what training changed" in done.stdout


@pytest.mark.slow
def test_a_world_that_breaks_tells_how_far_it_came(tmp_path: Path, site: Path) -> None:
    done = run(tmp_path, "--num_processes", "1", "--backend", "broken", site=site)
    assert done.returncode == 1
    assert "OSError: the network is gone" in done.stderr
    assert rows(done.stdout)["reduce"][0] == "ok"
    assert "ended with exit code 1 after 3 checks" in done.stderr
    assert "objects" not in rows(done.stdout)


def test_contradicting_flags_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "torch")
    assert done.returncode == 2
    assert "--cpu and --device (torch) contradict each other" in done.stderr
