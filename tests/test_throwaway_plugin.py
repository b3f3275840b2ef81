"""A backend in a wheel of its own is found, chosen by the YAML, and trains. Nothing of the core knows it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "throwaway-plugin"
version = "0.3"
dependencies = ["drivetrain"]

[project.entry-points."drivetrain.backends"]
throwaway = "throwaway_plugin:Throwaway"

[tool.hatch.build.targets.wheel]
packages = ["throwaway_plugin"]
"""

PLUGIN = '''
"""Counts its steps and says so at the end."""

import attrs
from drivetrain.plugin import Backend, Capabilities, hookimpl


@attrs.frozen(kw_only=True)
class Config:
    """Section of the YAML."""

    loudness: int = 1


class Throwaway(Backend):
    """Trains like one process, and counts."""

    api = (1, 0)
    Config = Config
    steps = 0

    @property
    def capabilities(self):
        return Capabilities(distributed_type="THROWAWAY")

    @hookimpl
    def step(self, optimizer):
        optimizer.step()
        self.steps += 1
        return True

    @hookimpl
    def shutdown(self, run):
        print("throwaway stepped", self.steps, "times", "!" * self.config.loudness)
'''

SCRIPT = """
import torch
from drivetrain import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
data = torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for x in data:
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
print(accelerator.distributed_type)
accelerator.end_training()
"""


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the plugin installed from a wheel that was built for this test."""
    source = tmp_path_factory.mktemp("throwaway")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "throwaway_plugin").mkdir()
    (source / "throwaway_plugin" / "__init__.py").write_text(PLUGIN)
    built = run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"], source)
    assert built.returncode == 0, built.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    installed = source / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    done = run([*pip, str(wheel)], source)
    assert done.returncode == 0, done.stderr
    return installed


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def launch(workdir: Path, site: Path | None, yaml: str) -> subprocess.CompletedProcess[str]:
    (workdir / "config.yaml").write_text(textwrap.dedent(yaml))
    path = {"PYTHONPATH": str(site)} if site is not None else {}
    command = [sys.executable, "-m", "drivetrain", "launch", "--config_file", "config.yaml", "train.py"]
    return run(command, workdir, **path)


@pytest.mark.slow
def test_it_is_chosen_by_the_yaml_and_trains(workdir: Path, site: Path) -> None:
    done = launch(workdir, site, "backend: throwaway\nthrowaway: {loudness: 3}\nnum_processes: 1\ndevice: cpu\n")
    assert done.returncode == 0, done.stderr
    assert "throwaway stepped 3 times !!!" in done.stdout
    assert "THROWAWAY" in done.stdout


def test_a_mistake_in_its_section_names_file_line_and_column(workdir: Path, site: Path) -> None:
    done = launch(workdir, site, "backend: throwaway\nthrowaway:\n  loudnes: 3\nnum_processes: 1\n")
    assert done.returncode != 0
    assert "config.yaml:3:3" in done.stderr
    assert "did you mean 'loudness'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_wheel_its_name_is_unknown(workdir: Path) -> None:
    done = launch(workdir, None, "backend: throwaway\nnum_processes: 1\n")
    assert done.returncode != 0
    assert "config.yaml:1:10: no backend 'throwaway'" in done.stderr
    assert "ddp (drivetrain-ddp" in done.stderr


def test_it_is_listed(workdir: Path, site: Path) -> None:
    done = run([sys.executable, "-m", "drivetrain", "plugins"], workdir, PYTHONPATH=str(site), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "throwaway-plugin" in done.stdout
