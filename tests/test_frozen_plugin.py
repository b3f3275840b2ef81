"""Plugins that somebody wrote for API 1.0 load and train on this core, and those for another API are refused in words.

The wheel under ``tests/frozen`` was built when the contract was at 1.0; its README says what a failure here means.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from drivetrain import doctor, registry
from drivetrain.plugin import API, Check

FROZEN = Path(__file__).with_name("frozen")
WHEEL = FROZEN / "drivetrain_frozen-1.0-py3-none-any.whl"
SOURCE = FROZEN / "src" / "drivetrain_frozen" / "__init__.py"
DIGEST = "66b2e312e65b3acdd2963008ef947bed5e25897f3dda61de858703c02a843b26"
EPOCHS = 3

SCRIPT = """
import json, sys
import torch
from torch.nn.functional import mse_loss
from drivetrain import Accelerator, FrozenKwargs

accelerator = Accelerator(frozen_plugin=FrozenKwargs(level=5), gradient_accumulation_steps=2)
x = torch.linspace(-1, 1, 32).reshape(16, 2)
data = torch.utils.data.TensorDataset(x, x.sin())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def epoch():
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


def weights():
    return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


for number in range(EPOCHS - 1):
    epoch()
accelerator.save_state("state")
epoch()
first = weights()
accelerator.load_state("state")
epoch()
facts = {
    "weights": first,
    "again": weights(),
    "kind": str(accelerator.distributed_type),
    "names": dict(accelerator.run.names),
    "processes": accelerator.num_processes,
    "level": accelerator.run.hooks.plugin("backend").config.level,
    "gathered": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
    "sum": accelerator.reduce(torch.ones(1), "sum").item(),
}
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print("FACTS", json.dumps(facts))
accelerator.end_training()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``drivetrain`` where the plugin is installed in ``folder / "site"``."""
    unwanted = ("DRIVETRAIN_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment |= {"PYTHONPATH": str(folder / "site"), "DRIVETRAIN_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "drivetrain", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the wheel is installed: for one of pure Python that means unpacked."""
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "train.py").write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
    return tmp_path


def by_hand() -> dict[str, torch.Tensor]:
    """The same training in one process: two ranks with groups of two micro-batches of four are the whole data."""
    x = torch.linspace(-1, 1, 32).reshape(16, 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        mse_loss(model(x), x.sin()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


def hooks_of(role: str) -> set[str]:
    """Hooks that the class of a role notes when they are called."""
    tree = ast.parse(SOURCE.read_text("utf-8"))
    name = f"Frozen{role.capitalize()}"
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if "_note(" in ast.unparse(node) or "CALLED[" in ast.unparse(node)} - {
        "_note"
    }


def test_the_wheel_is_the_one_that_was_frozen_and_is_of_the_source_beside_it() -> None:
    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() == DIGEST, "see tests/frozen/README.md"
    with zipfile.ZipFile(WHEEL) as wheel:
        assert wheel.read("drivetrain_frozen/__init__.py").decode() == SOURCE.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_trains_on_two_processes_as_one_does_on_the_whole_batch(folder: Path) -> None:
    settings = ["--backend", "frozen", "--device", "frozen-cpu", "--mixed_precision", "frozen"]
    done = run(folder, "launch", *settings, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    facts = json.loads(line.removeprefix("FACTS "))
    assert facts["names"] == {"backend": "frozen", "device": "frozen-cpu", "precision": "frozen-exact"}
    assert (facts["processes"], facts["kind"], facts["level"]) == (2, "FROZEN", 5)
    assert (facts["gathered"], facts["sum"]) == ([0, 1], 2.0)
    for name, right in by_hand().items():
        torch.testing.assert_close(torch.tensor(facts["weights"][name]), right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(facts["again"][name]), right, rtol=1e-5, atol=1e-6)
    for role in ("backend", "device", "precision"):
        (called,) = (line for line in done.stdout.splitlines() if line.startswith(f"frozen {role}:"))
        assert set(called.split(": ")[1].split()) == hooks_of(role), "hooks of API 1.0 are called as ever"


def test_it_is_listed_and_examined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder / "site"))
    registry.refresh()
    try:
        assert registry.exported("FrozenKwargs").section == "frozen"
        rows = [
            row
            for role, name in (("backend", "frozen"), ("device", "frozen-cpu"), ("precision", "frozen-exact"))
            for row in doctor.examine(registry.find(role, name), timeout=60.0)
        ]
    finally:
        registry.refresh()
        sys.modules.pop("drivetrain_frozen", None)
    assert {row.check.ok for row in rows} <= {True, None}
    assert Check("frozen", True, "as ever", "nothing to do") in [row.check for row in rows]


@pytest.mark.parametrize(
    ("api", "upgrade"),
    [((API[0], API[1] + 1), "drivetrain"), ((API[0] + 1, 0), "drivetrain"), ((API[0] - 1, 9), "drivetrain-frozen")],
)
def test_the_same_plugin_for_another_api_is_refused_before_anything_starts(
    folder: Path, api: tuple[int, int], upgrade: str
) -> None:
    module = folder / "site" / "drivetrain_frozen" / "__init__.py"
    module.write_text(module.read_text("utf-8").replace("api = (1, 0)", f"api = {api}"), "utf-8")
    done = run(folder, "launch", "--num_processes", "2", "--backend", "frozen", "train.py")
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: backend 'frozen' (drivetrain-frozen 1.0) can't be used: it was written for plugin API "
        f"{api[0]}.{api[1]}, but drivetrain here speaks {API[0]}.{API[1]}: pip install --upgrade {upgrade}\n"
    )
    assert done.stdout == ""
