"""``drivetrain new-plugin`` writes packages that keep the contract as they are, for each role."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from drivetrain import hookspecs, registry
from drivetrain.cli import main
from drivetrain.discovery import GROUPS
from drivetrain.testing.conformance.checks import matching
from drivetrain.testing.conformance.report import Report
from drivetrain.testing.conformance.session import Workers, conform
from drivetrain.testing.conformance.subject import Suite
from drivetrain.testing.pool import WorkerPool

NAMES = {role: f"made-{role}" for role in GROUPS}
AUTHOR = 'Ada "the first" Lovelace'


def write(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["new-plugin", *arguments, "--directory", str(folder)], prog_name="drivetrain")


def package(name: str) -> str:
    return f"drivetrain_{name.replace('-', '_')}"


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DRIVETRAIN_")}
    return subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=500
    )


# ----------------------------------------------------------------------------------------------------- what is written


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package of each role, as it was written."""
    folders = {}
    for role, name in NAMES.items():
        folders[role] = tmp_path_factory.mktemp("sources") / name
        result = write(folders[role], name, "--role", role, "--author", AUTHOR)
        assert result.exit_code == 0, result.output
        assert f"drivetrain conform --{role} {name}" in result.output
    return folders


@pytest.mark.parametrize("role", GROUPS)
def test_a_package_is_complete(sources: Mapping[str, Path], role: str) -> None:
    folder = sources[role]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    source = f"src/{package(NAMES[role])}"
    wanted = {"pyproject.toml", "README.md", "LICENSE", ".gitignore", ".github/workflows/test.yml"}
    assert wanted | {"tests/test_conformance.py", f"{source}/__init__.py", f"{source}/py.typed"} <= written
    assert AUTHOR in (folder / "LICENSE").read_text("utf-8")
    for path in written:
        text = (folder / path).read_text("utf-8")
        assert "$" not in text, f"{path} has a placeholder left"
        assert text.endswith("\n") or not text
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120


def test_a_device_has_every_hook_it_may_have_and_a_line_on_each(sources: Mapping[str, Path]) -> None:
    name = NAMES["device"]
    tree = ast.parse((sources["device"] / "src" / package(name) / "__init__.py").read_text("utf-8"))
    (plugin,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MadeDevice")
    hooks = {
        node.name: ast.get_docstring(node)
        for node in plugin.body
        if isinstance(node, ast.FunctionDef) and "hookimpl" in map(ast.unparse, node.decorator_list)
    }
    assert list(hooks) == [found.name for found in hookspecs.hooks().values() if "device" in found.roles]
    assert all(hooks.values())


def test_writing_a_package_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom drivetrain.cli import main\n"
        "try: main(['new-plugin', 'quick', '--role', 'backend'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drivetrain-quick" / "pyproject.toml").exists()


def test_the_test_of_a_package_is_the_kit(sources: Mapping[str, Path]) -> None:
    for role, folder in sources.items():
        assert f'Suite({role}="{NAMES[role]}"' in (folder / "tests" / "test_conformance.py").read_text("utf-8")


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("My Plugin", "'My Plugin' is not made of lower-case letters, digits and single dashes"),
        ("My Plugin", "what about 'my-plugin'?"),
        ("3d", "what about 'd'?"),
        ("a_b", "what about 'a-b'?"),
        ("a--b", "what about 'a-b'?"),
        ("drivetrain-acme", "leave drivetrain- out, the package gets it by itself: acme"),
        ("single", "backend 'single' (drivetrain"),
        ("bf16", "precision 'bf16' (drivetrain"),
        ("ddp", "backend 'ddp' (drivetrain-ddp"),
        ("device", "'device' is a word of the YAML itself"),
        ("auto", "'auto' is a word of the YAML itself"),
        ("off", "'off' is a word of the YAML itself"),
        ("backends", "there is a package called drivetrain_backends"),
        ("dev", 'is what pip install "drivetrain[dev]" brings'),
    ],
)
def test_a_name_that_could_not_be_used_is_refused_with_the_reason(tmp_path: Path, name: str, says: str) -> None:
    result = write(tmp_path / "new", name, "--role", "device")
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for folder in (tmp_path, tmp_path / "mine"):
        result = write(folder, "acme", "--role", "device")
        assert result.exit_code == 2
        assert "exists and is not an empty folder; nothing was written" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_role_must_be_one_of_the_three(tmp_path: Path) -> None:
    result = write(tmp_path / "new", "acme", "--role", "tracker")
    assert result.exit_code == 2
    assert "'backend', 'device', 'precision'" in result.output


# ------------------------------------------------------------------------------------------------ what it does as it is


@pytest.fixture(scope="module")
def site(sources: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The three packages, built and installed from what was written, seen by this process too."""
    installed = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = run([*pip, "--target", str(installed), *map(str, sources.values())], installed)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(installed))
    registry.refresh()
    yield installed
    sys.path.remove(str(installed))
    for name in map(package, NAMES.values()):
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
    registry.refresh()


class OnePool(Workers):
    """The same processes for all suites of this file: these plugins leave nothing behind in them."""

    def get(self, size: int, environment: Mapping[str, str], plugins: Any) -> WorkerPool:
        return super().get(4, {}, None)


@pytest.fixture(scope="module")
def workers(site: Path) -> Iterator[OnePool]:
    workers = OnePool()
    yield workers
    workers.close()


WHOLE_BATCH = "losses and weights are those of one process"
GROUPED = "a short last group is a mean"


def examine(workers: Workers, *checks: str, **plugins: str) -> Report:
    chosen = [check for text in checks for check in matching(text)]
    report = conform(Suite(**plugins), chosen, workers=workers)
    assert not report.failed, report.details()
    return report


def test_it_is_installed_with_its_metadata(site: Path) -> None:
    metadata = importlib.metadata.metadata("drivetrain-made-device")
    assert metadata["Author"] == AUTHOR
    for role, name in NAMES.items():
        found = registry.load(registry.find(role, name))
        assert (found.role, found.api) == (role, (1, 0))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", GROUPS)
def test_each_keeps_the_rules_and_trains(workers: OnePool, role: str) -> None:
    report = examine(workers, "static: ", WHOLE_BATCH, GROUPED, **{"device": "cpu", role: NAMES[role]})
    assert len(report.of("passed")) >= 12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_the_device_and_the_precision_train_under_a_backend_of_ours(workers: OnePool, backend: str) -> None:
    plugins = {"device": NAMES["device"], "precision": NAMES["precision"]}
    report = examine(workers, WHOLE_BATCH, GROUPED, backend=backend, **plugins)
    assert len(report.of("passed")) == 2


def rounds() -> list[str]:
    """Classes of the layers in training, and after they were taken back."""
    import torch

    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    plain = accelerator.unwrap_model(model)
    before = type(plain[0]).__name__
    return [before, type(accelerator.run.hooks.restore_model(run=accelerator.run, model=plain)[0]).__name__]


def test_the_precision_really_computes_in_its_layers_and_takes_them_back(workers: OnePool) -> None:
    pool = workers.get(1, {}, None)
    config = {"device": "cpu", "mixed_precision": NAMES["precision"]}
    assert pool.run(rounds, size=1, config=config) == [["RoundedLinear", "Linear"]]


def drifts() -> str:
    """What is said when ranks have different weights."""
    import torch

    from drivetrain import Accelerator
    from drivetrain.errors import DrivetrainError

    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.weight.fill_(accelerator.process_index)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    try:
        optimizer.step()
    except DrivetrainError as error:
        return str(error)
    return ""


def test_the_backend_notices_ranks_that_drift_apart(workers: OnePool) -> None:
    pool = workers.get(2, {}, None)
    name = NAMES["backend"]
    config = {"device": "cpu", "backend": name, name: {"check_every": 1}}
    assert all("ranks [1] hold other weights than rank 0" in said for said in pool.run(drifts, size=2, config=config))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", GROUPS)
def test_each_passes_the_whole_kit(site: Path, sources: Mapping[str, Path], role: str) -> None:
    on_cpu = [] if role == "device" else ["--device", "cpu"]
    command = [sys.executable, "-m", "drivetrain", "conform", f"--{role}", NAMES[role], *on_cpu]
    done = run(command, sources[role], PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "known 0, failed 0" in done.stdout
