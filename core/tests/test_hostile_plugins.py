"""Plugins that are broken or mean: named, each is an error with plugin, distribution and cure; else none is noticed.

What is loaded from an entry point is in ``test_loading.py``, what pluggy would pass over in ``test_binding_traps.py``,
crashes and hangs in ``test_doctor.py``, false claims in ``conform/``. Here they meet whole runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from drivetrain import doctor, registry
from drivetrain.config import resolve
from drivetrain.discovery import GROUPS
from drivetrain.errors import PluginError
from drivetrain.runtime import Runtime, start
from drivetrain.world import Topology

KEYS = {"backend": "backend", "device": "device", "precision": "mixed_precision"}
HEAD = "import attrs\nfrom drivetrain.plugin import *\n"


@attrs.frozen
class Hostile:
    """A plugin that is wrong in one way. Its distribution is ``<name>-dist 1.0``."""

    name: str
    says: str
    """What the error of a run that names it says, beside plugin and distribution."""
    body: str = ""
    """Of its class, beside ``api``."""
    role: str = "backend"
    module: str | None = None
    """Its whole module."""
    value: str | None = None
    """Its entry point, if that is what is wrong."""
    requires: tuple[str, ...] = ()

    def install(self, site: Any) -> None:
        """Put it into a site."""
        module = f"hostile_{self.name.replace('-', '_')}"
        source = f"{HEAD}class Plug({self.role.capitalize()}):\n    api = (1, 0)\n"
        source += "".join(f"    {line}\n" for line in self.body.splitlines())
        site.install(
            f"{self.name}-dist",
            entry_points={GROUPS[self.role]: {self.name: self.value or f"{module}:Plug"}},
            requires=self.requires,
            modules={module: source if self.module is None else self.module},
        )


HOSTILE = [
    Hostile(
        "raises", "RuntimeError: driver too old. `drivetrain doctor`", module="raise RuntimeError('driver too old')"
    ),
    Hostile("exits", "SystemExit: 3. `drivetrain doctor`", module="raise SystemExit(3)"),
    Hostile("garbled", "SyntaxError", module="def"),
    Hostile("no-module", "No module named 'hostile_nowhere'", value="hostile_nowhere:Plug"),
    Hostile("no-attribute", "AttributeError", value="hostile_no_attribute:Missing"),
    Hostile("no-class", "should read 'module:Class'", value="hostile_no_class"),
    Hostile("number", "is no class, but of type int", module="Plug = 3"),
    Hostile("stranger", "is no subclass of drivetrain.plugin.Backend", module="class Plug: api = (1, 0)"),
    Hostile(
        "other-role", "is no subclass of drivetrain.plugin.Backend", module=f"{HEAD}class Plug(Device): api = (1, 0)"
    ),
    Hostile("newer-minor", "written for plugin API 1.99, but drivetrain here speaks 1", "api = (1, 99)"),
    Hostile("other-major", "written for plugin API 2.0, but drivetrain here speaks 1", "api = (2, 0)"),
    Hostile("no-api", "but is missing", module=f"{HEAD}class Plug(Backend): pass"),
    Hostile("engine", "its engine doesn't fit: it needs torch>=99", "requires = ('torch>=99',)"),
    Hostile("requirement", "needs torch>=99, but", requires=("torch>=99",)),
    Hostile("absent", "pip install --upgrade absent-dist", requires=("no-such-engine-xyz",)),
    Hostile(
        "unhashable",
        "use @attrs.define(eq=False)",
        module=f"{HEAD}@attrs.define\nclass Plug(Backend):\n    api = (1, 0)\n    config: object = None",
    ),
    Hostile("misspelt", "did you mean 'wrap_model'?", "@hookimpl\ndef wrap_modle(self, model): return model"),
    Hostile("unmarked", "put @hookimpl on it", "def step(self, optimizer): return True"),
    Hostile("argument", "did you mean 'optimizer'?", "@hookimpl\ndef step(self, optimiser): return True"),
    Hostile("wrapper", "API 1 has none", "@hookimpl(wrapper=True)\ndef step(self, optimizer): return (yield)"),
    Hostile("config", "decorate it with @attrs.frozen", "class Config: level = 1"),
    Hostile("annotation", "can't be resolved", "@attrs.frozen\nclass Config:\n    level: 'Nowhere' = 1"),
    Hostile(
        "init",
        "ValueError: no licence. Try another version of init-dist",
        "def __init__(self, config): raise ValueError('no licence')",
    ),
    Hostile(
        "capabilities",
        "its capabilities raised KeyError: 'size'. Try another",
        "@property\ndef capabilities(self): return {}['size']",
    ),
    Hostile("claims-dict", "its capabilities must be a drivetrain.plugin.Capabilities, but is {}", "capabilities = {}"),
    Hostile(
        "policy", "its policy raised ZeroDivisionError", "@property\ndef policy(self): return 1 / 0", role="precision"
    ),
    Hostile(
        "no-policy", "its policy must be a drivetrain.plugin.Policy, but is None", "policy = None", role="precision"
    ),
    Hostile(
        "refuses",
        "Plug.refuses raised OSError: no cable. Try another",
        "def refuses(self, *facts): raise OSError('no cable')",
        role="precision",
    ),
    Hostile(
        "gives-up",
        "its refuses raised OSError: no cable. Try another",
        "def refuses(self, *facts): raise OSError('no cable')",
    ),
    Hostile(
        "text", "must return a device, but returned 'cpu'", "@hookimpl\ndef device(self): return 'cpu'", role="device"
    ),
    Hostile(
        "nothing", "returned None, but must return something", "@hookimpl\ndef device(self): return None", role="device"
    ),
    Hostile("world", "must return a World, but returned (0, 1)", "@hookimpl\ndef init_world(self): return (0, 1)"),
]
IN_USE = [
    Hostile("aborts", "", module="import os; os.abort()"),
    Hostile("hangs", "", module="import time; time.sleep(300)"),
    Hostile("hangs-in-checks", "", "@classmethod\ndef checks(cls):\n    import time; time.sleep(300)"),
    Hostile("absent-minded", "", "@classmethod\ndef present(cls): raise OSError('lib missing')", role="device"),
    Hostile("single", "", module="raise RuntimeError('shadow')"),
    Hostile("no", "", "@property\ndef policy(self): return 1 / 0", role="precision"),
    Hostile("torch", "", "@hookimpl\ndef device(self): return 'cpu'", role="device"),
]
"""More of them, for runs that name none: some can't be tried in this process, some take core's own names."""


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Runtime]:
    """A run of one process with these settings alone."""
    resolved = resolve(None, command_line=settings, environment={"DRIVETRAIN_HOME": str(folder)})
    runtime = start(resolved, Topology())
    try:
        yield runtime
    finally:
        runtime.close()


@pytest.mark.parametrize("plugin", HOSTILE, ids=lambda plugin: plugin.name)
def test_a_run_that_names_it_fails_with_plugin_distribution_and_cure(
    open_site: Any, tmp_path: Path, plugin: Hostile
) -> None:
    plugin.install(open_site)
    with pytest.raises(PluginError) as caught, running(tmp_path, **{"device": "cpu", KEYS[plugin.role]: plugin.name}):
        pass
    text = str(caught.value)
    assert f"{plugin.role} {plugin.name!r} ({plugin.name}-dist 1.0)" in text
    assert plugin.says in text


def test_an_exception_in_a_hook_names_hook_plugin_and_distribution(open_site: Any, tmp_path: Path, notes_of) -> None:
    Hostile("faulty", "", "@hookimpl\ndef init_world(self): raise OSError('no cable')").install(open_site)
    with pytest.raises(OSError, match="no cable") as caught, running(tmp_path, device="cpu", backend="faulty"):
        pass
    assert notes_of(caught.value) == ["in hook 'init_world' of backend 'faulty' (faulty-dist 1.0)"]


# ------------------------------------------------------------------------------------------------ names of core's own


def test_a_name_that_two_distributions_have_is_an_error_only_for_who_uses_it(open_site: Any, tmp_path: Path) -> None:
    for name, role in (("single", "backend"), ("no", "precision"), ("cpu", "device")):
        Hostile(name, "", role=role).install(open_site)
    with running(tmp_path) as runtime:  # core's own, as nobody said otherwise
        assert {runtime.run.hooks.origin(role).distribution for role in KEYS} == {"drivetrain"}
    for key, name in (("backend", "single"), ("mixed_precision", "no"), ("device", "cpu")):
        with pytest.raises(PluginError) as caught, running(tmp_path, **{key: name}):
            pass
        assert {f"{name}-dist", "drivetrain", "both", "uninstall"} <= set(re.findall(r"[\w-]+", str(caught.value)))
        with running(tmp_path, **{key: f"drivetrain:{name}"}):
            pass


# ------------------------------------------------------------------------------------------------- nobody named them


@pytest.fixture
def infested(open_site: Any) -> Any:
    """A site with all of them."""
    for plugin in (*HOSTILE, *IN_USE):
        plugin.install(open_site)
    return open_site


def test_a_run_that_names_none_of_them_is_not_disturbed(infested: Any, tmp_path: Path) -> None:
    with running(tmp_path) as runtime:
        assert {runtime.run.hooks.origin(role).distribution for role in KEYS} == {"drivetrain"}
        (note,) = (note for note in runtime.notes if "absent-minded" in note)
        assert "device 'absent-minded' (absent-minded-dist 1.0) can't say whether it is present: OSError" in note
    roles = {f"hostile_{plugin.name.replace('-', '_')}": plugin.role for plugin in (*HOSTILE, *IN_USE)}
    assert {roles[name] for name in roles if name in sys.modules} == {"device"}, "device: auto asks devices, no others"


SCRIPT = """
import torch
from drivetrain import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 1)).sum())
optimizer.step()
print("trained with", dict(accelerator.run.names))
"""


def drivetrain(folder: Path, site: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that sees the site."""
    unwanted = ("DRIVETRAIN_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment |= {"PYTHONPATH": str(site.directory), "DRIVETRAIN_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "drivetrain", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_that_name_none_of_them_are_not_disturbed(infested: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text("num_processes: 1\n")
    done = drivetrain(tmp_path, infested, "launch", "--config_file", "config.yaml", "train.py")
    assert done.returncode == 0, done.stderr
    assert "trained with {'backend': 'single', 'device': 'torch', 'precision': 'no'}" in done.stdout
    for command in (("plugins",), ("config", "show"), ("config", "check", "config.yaml"), ("--help",)):
        done = drivetrain(tmp_path, infested, *command)
        assert done.returncode == 0, done.stderr
    listed = json.loads(drivetrain(tmp_path, infested, "plugins", "--json").stdout)
    assert {plugin.name for plugin in (*HOSTILE, *IN_USE)} <= {row["name"] for row in listed}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_doctor_has_a_bad_row_for_each_that_can_be_seen_without_a_run(infested: Any, tmp_path: Path) -> None:
    done = drivetrain(tmp_path, infested, "doctor", "--json", "--timeout", "10")
    assert done.returncode == 1, done.stderr
    bad = {row["subject"] for row in json.loads(done.stdout) if row["ok"] is False}
    loading = HOSTILE[: HOSTILE.index(_named("unhashable"))]  # what is wrong with the others shows in a run
    seen = [plugin for plugin in loading if plugin.name != "engine"]  # whose engine is not there: no fault of anybody
    seen += [_named("config"), *IN_USE[:4]]
    assert {f"{plugin.role} {plugin.name!r} ({plugin.name}-dist 1.0)" for plugin in seen} <= bad
    assert "backend 'single'" in bad  # the name is taken twice


def _named(name: str) -> Hostile:
    return next(plugin for plugin in HOSTILE if plugin.name == name)


# ------------------------------------------------------------------------------------------------------------ doctor


@pytest.mark.parametrize(
    ("name", "says"), [("aborts", "was killed by SIGABRT"), ("hangs-in-checks", "did not finish in 5 s")]
)
def test_a_crash_at_import_and_a_hang_in_checks_are_rows_with_a_cure(site: Any, name: str, says: str) -> None:
    plugin = next(plugin for plugin in IN_USE if plugin.name == name)
    plugin.install(site)
    rows = doctor.examine(registry.find("backend", name), timeout=5.0)
    check = next(row.check for row in rows if row.check.name == "process")
    assert check.ok is False
    assert says in check.detail
    assert f"pip install --upgrade {name}-dist" in check.fix
