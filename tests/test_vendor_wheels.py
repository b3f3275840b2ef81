"""A stranger's chip beside Drivetrain, both from wheels, in an environment of its own: no line of core changes for it.

All of it runs with ``torch.cuda`` out of reach of core, the base backends and the plugin: one attribute of it read by
any of their files is an error, and a line in a log. torch itself may use it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import attrs
import pytest

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = (ROOT, ROOT / "backends", ROOT / "backends_ddp", ROOT / "backends_fsdp")

# The first test of a checkout compiles the chip's library.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

GUARD = '''
"""Imported at the start of every Python of this environment: see tests/test_vendor_wheels.py."""

import importlib.machinery
import os
import sys
import types


class Guarded(types.ModuleType):
    def __getattribute__(self, name):
        where = sys._getframe(1).f_code.co_filename
        if f"{os.sep}site-packages{os.sep}drivetrain" in where:
            with open(os.environ["CUDA_LOG"], "a") as log:
                print(f"{where}: torch.cuda.{name}", file=log)
            raise AssertionError(f"torch.cuda.{name} is used by {where}")
        return super().__getattribute__(name)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.cuda":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def guarded(module):
            execute(module)
            module.__class__ = Guarded

        spec.loader.exec_module = guarded
        return spec


sys.meta_path.insert(0, Finder())
'''


@attrs.frozen
class Environment:
    """A virtual environment with wheels of core, three members and the plugin."""

    folder: Path

    @property
    def log(self) -> Path:
        """Where uses of ``torch.cuda`` are written down."""
        return self.folder / "cuda.log"

    def run(self, *command: str, limit: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        unwanted = ("PYTHON", "DRIVETRAIN_", "ACME_", "TORCHELASTIC_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder,
            env={
                **inherited,
                "CUDA_LOG": str(self.log),
                "DRIVETRAIN_HOME": str(self.folder / "home"),
                "ACME_SIMULATED_CHIPS": "2",
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "250",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )

    def succeed(self, *command: str, **options: Any) -> str:
        """Run a program that must end well, and use no ``torch.cuda``; what it printed."""
        done = self.run(*command, **options)
        assert done.returncode == 0, done.stdout[-6000:]
        assert not self.log.exists(), self.log.read_text()
        return done.stdout


@pytest.fixture(scope="module")
def environment(acme_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Nothing in it is editable. What is no work of ours, torch foremost, is seen where it is already."""
    folder = tmp_path_factory.mktemp("environment")
    made = Environment(folder)
    wheels = folder / "dist"
    for member in MEMBERS:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        built = subprocess.run(command, cwd=member, capture_output=True, text=True, timeout=120)
        assert built.returncode == 0, built.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "others.pth").write_text(f"{_without_ours(folder / 'others')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    found = ["--no-index", "--find-links", str(wheels), "--find-links", str(acme_wheel.parent)]
    done = subprocess.run(
        [*pip, *found, "drivetrain-acme", "drivetrain[ddp,fsdp]"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (site / "guard_cuda.py").write_text(GUARD)
    (site / "guard_cuda.pth").write_text("import guard_cuda\n")
    return made


def _without_ours(folder: Path) -> Path:
    """A folder that shows all that is installed here but distributions of ours."""
    folder.mkdir()
    for path in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for entry in path.iterdir():
            if "drivetrain" not in entry.name and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


def test_the_wheels_are_what_runs(environment: Environment) -> None:
    code = "import drivetrain, drivetrain_fsdp, drivetrain_acme, torch_acme; print(drivetrain.__file__)"
    assert str(environment.folder) in environment.succeed("python", "-c", code)


def test_a_use_of_cuda_by_one_of_ours_would_be_noticed(environment: Environment) -> None:
    site = next((environment.folder / "lib").glob("python*")) / "site-packages"
    spy = site / "drivetrain_spy.py"
    spy.write_text("import torch\n\ndef look():\n    return torch.cuda.is_available()\n")
    try:
        done = environment.run("python", "-c", "import drivetrain_spy; drivetrain_spy.look()")
        assert done.returncode != 0
        assert "torch.cuda.is_available is used by" in done.stdout
        assert "torch.cuda.is_available" in environment.log.read_text()
        allowed = environment.run(
            "python", "-c", "import torch; torch.manual_seed(0); print(torch.cuda.is_available())"
        )
        assert "False" in allowed.stdout or "True" in allowed.stdout
    finally:
        spy.unlink()
        environment.log.unlink(missing_ok=True)


def test_plugins_lists_it_without_loading_its_library(environment: Environment) -> None:
    listed = environment.succeed("drivetrain", "plugins")
    assert "drivetrain-acme" in listed
    code = "import drivetrain.cli, drivetrain_acme, sys; print('torch' in sys.modules)"
    assert environment.succeed("python", "-c", code).strip() == "False"


def test_doctor_finds_its_chips(environment: Environment) -> None:
    rows = environment.succeed("drivetrain", "doctor").partition("device 'acme'")[2].splitlines()
    assert any("chips" in row and "2 visible" in row for row in rows[:5]), rows


@pytest.mark.parametrize(
    "backend",
    [pytest.param("single", marks=pytest.mark.nightly), pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"],
)
def test_it_conforms_under_every_backend(environment: Environment, backend: str) -> None:
    # Four chips: checkpoints are also loaded by more processes than wrote them.
    command = ("drivetrain", "conform", "--device", "acme", "--backend", backend)
    output = environment.succeed(*command, limit=1500, ACME_SIMULATED_CHIPS="4")
    assert "failed 0" in output
    assert "known 0" in output


def test_its_own_tests_are_the_conformance_kit(environment: Environment) -> None:
    tests = ROOT / "backends" / "template" / "tests"
    output = environment.succeed("python", "-m", "pytest", "-p", "no:cacheprovider", str(tests), "-k", "static and ddp")
    assert "conformance: backend ddp, device acme" in output
    assert " passed" in output


@pytest.mark.parametrize(("backend", "processes"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_demo_trains_on_it(environment: Environment, backend: str, processes: int) -> None:
    config = environment.folder / f"{backend}.yaml"
    text = f"""
        backend: {backend}
        num_processes: {processes}
        device: acme
        mixed_precision: {"bf16" if backend == "ddp" else "no"}
        collective_timeout: 60
    """
    config.write_text(textwrap.dedent(text))
    script = str(ROOT / "examples" / "digits" / "train.py")
    command = ("drivetrain", "launch", "--config_file", str(config), script, "--epochs", "3")
    output = environment.succeed(*command, limit=600)
    assert f"processes: {processes}, weights equal on all of them: True" in output
    accuracy = float(output.rpartition("test accuracy: ")[2].split()[0])
    assert accuracy > 0.9, output[-2000:]
