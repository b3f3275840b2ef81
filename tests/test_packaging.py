"""What is built installs like a release: versions agree, wheels are complete, and a fresh environment trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = sorted(path.parent for path in ROOT.glob("*/pyproject.toml"))
TORCH = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def version(folder: Path) -> str:
    path = folder / project(folder)["tool"]["hatch"]["version"]["path"]
    return re.search(r'^__version__ = "(.+)"', path.read_text(), re.MULTILINE)[1]


def test_all_members_have_one_version_and_pin_each_other_to_it() -> None:
    current = version(ROOT)
    assert {str(member.name): version(member) for member in MEMBERS} == {member.name: current for member in MEMBERS}
    for folder in (ROOT, *MEMBERS):
        metadata = project(folder)["project"]
        extras = metadata.get("optional-dependencies", {})
        for text in (*metadata["dependencies"], *(one for extra in extras.values() for one in extra)):
            requirement = Requirement(text)
            if requirement.name.startswith("drivetrain-") or (folder != ROOT and requirement.name == "drivetrain"):
                assert str(requirement.specifier) == f"=={current}", f"{folder.name}: {text}"
    assert re.search(rf"^## {re.escape(current)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_extra_that_brings_a_member_says_which_role_its_plugins_have() -> None:
    metadata = project(ROOT)["project"]
    brought = {
        extra: name
        for extra, requirements in metadata["optional-dependencies"].items()
        for name in (Requirement(text).name for text in requirements)
        if name.startswith("drivetrain-")
    }
    roles = metadata["entry-points"]["drivetrain.extras"]
    assert set(roles) == set(brought)
    members = {project(member)["project"]["name"]: project(member)["project"] for member in MEMBERS}
    for extra, role in roles.items():
        assert members[brought[extra]]["entry-points"][f"drivetrain.{role}s"]


def test_every_member_is_installed_by_make_and_has_a_readme() -> None:
    listed = re.search(r"^MEMBERS := (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(listed) == [member.name for member in MEMBERS]
    for member in MEMBERS:
        assert (member / "README.md").read_text().startswith("# ")


def test_every_member_has_the_licence_in_its_own_folder() -> None:
    """A build sees no file outside of the member's folder, so each has a copy."""
    for member in MEMBERS:
        assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), member.name
        assert project(member)["project"]["license-files"] == ["LICENSE"], member.name


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of all members."""
    folder = tmp_path_factory.mktemp("dist")
    for member in (ROOT, *MEMBERS):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(command, cwd=member, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_wheels_hold_the_package_its_types_and_nothing_else(dist: Path) -> None:
    wheels = {path.name.split("-")[0]: zipfile.ZipFile(path).namelist() for path in dist.glob("*.whl")}
    assert len(wheels) == 1 + len(MEMBERS)
    for name, files in wheels.items():
        tops = {file.split("/")[0] for file in files if ".dist-info" not in file}
        assert tops == {name}
        assert f"{name}/py.typed" in files
        assert any(file.endswith("licenses/LICENSE") for file in files), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fresh_environment_installs_the_wheels_and_trains(dist: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    python = str(venv / "bin" / "python")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "DRIVETRAIN_"))}

    def run(*command: str, limit: float = 600) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, TORCH)
    run(*pip, "--find-links", str(dist), "drivetrain[ddp,examples]")
    where = run(python, "-c", "import drivetrain, drivetrain_ddp; print(drivetrain.__file__)")
    assert str(venv) in where
    script = str(ROOT / "examples" / "digits" / "train.py")
    command = (str(venv / "bin" / "drivetrain"), "launch", "--cpu", "--num_processes", "2", script, "--epochs", "1")
    output = run(*command, limit=120)
    assert "processes: 2, weights equal on all of them: True" in output
