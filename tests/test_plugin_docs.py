"""What ``docs/`` says of plugins is so: the reference is current, links lead somewhere, and the examples work."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from drivetrain import defaults, discovery, hookspecs, plugin, registry
from drivetrain.binding import Hooks
from drivetrain.testing.conformance.checks import all_checks, matching
from drivetrain.testing.conformance.session import conform
from drivetrain.testing.conformance.subject import Suite

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDE = (DOCS / "plugins.md").read_text("utf-8")
REFERENCE = (DOCS / "hooks.md").read_text("utf-8")
HOOKS = hookspecs.hooks()


# ---------------------------------------------------------------------------------------------------------- reference


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_hooks", DOCS / "generate_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current() -> None:
    assert generator().render() == REFERENCE, "run: python docs/generate_hooks.py"


def test_every_hook_is_in_the_reference_and_every_hook_in_it_exists() -> None:
    assert re.findall(r"^### `(\w+)`$", REFERENCE, re.MULTILINE) == list(HOOKS)


def test_every_argument_that_is_documented_is_one(request: pytest.FixtureRequest) -> None:
    for section in REFERENCE.split("\n### ")[1:]:
        signature = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
        for name in re.findall(r"^\* `(\w+)`:", section, re.MULTILINE):
            assert re.search(rf"\b{name}: ", signature), section


# -------------------------------------------------------------------------------------------------------------- guide


def anchors(text: str) -> set[str]:
    """Where links into a page may lead: its headings, as web pages name them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        assert slug not in found, f"two headings have the anchor {slug}"
        found.add(slug)
    return found


@pytest.mark.parametrize("page", ["plugins.md", "hooks.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        path = DOCS / (file or page)
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text("utf-8")), target


def test_hooks_and_attributes_that_the_guide_names_exist() -> None:
    classes = (plugin.Plugin, plugin.Backend, plugin.Device, plugin.Precision)
    known = set(HOOKS) | {name for cls in classes for name in (*vars(cls), *cls.__annotations__)}
    table = re.search(r"\| attribute .*?\n\n(.*?)\n\n", GUIDE, re.DOTALL)
    assert table is not None
    named = set(re.findall(r"`(\w+)(?: = [^`]*|\(\))?`", table[0])) - {"drivetrain"}
    assert named <= known, named - known
    sentence = re.search(r"Where it does not, implement the hook:\n(.*?)\n\n", GUIDE, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) <= set(HOOKS)


def test_the_guide_lists_every_capability() -> None:
    section = GUIDE.split("**Capabilities**")[1].split("## Hooks")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.+?) \|", section, re.MULTILINE)))) == {
        field.name for field in attrs.fields(plugin.Capabilities)
    }


def test_the_known_defect_that_the_guide_shows_names_a_check() -> None:
    (name,) = re.findall(r'Known\("([^"]+)"', GUIDE)
    assert name in {check.name for check in all_checks()}


def test_every_python_block_compiles() -> None:
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        compile(block, "plugins.md", "exec")


# ----------------------------------------------------------------------------------------------------------- examples

STUB = """
def device_count(): return 2
def set_device(index): pass
"""
EXAMPLES = {"device": "zenith", "backend": "mirror", "precision": "short"}


def sources() -> Mapping[str, str]:
    """The examples that are whole files, by path."""
    return dict(re.findall(r"```python\n# src/(\S+)\n(.*?)```", GUIDE, re.DOTALL))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The examples of the guide, as an installer would have left them, and what the device's asks for."""
    folder = tmp_path_factory.mktemp("examples")
    for path, text in sources().items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "torch_zenith.py").write_text(STUB)
    names = {**{f"drivetrain-{name}": role for role, name in EXAMPLES.items()}, "torch-zenith": ""}
    for distribution, role in names.items():
        info = folder / f"{distribution.replace('-', '_')}-1.4.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.4\n")
        if role:
            name = EXAMPLES[role]
            line = f"{name} = drivetrain_{name}:{name.capitalize()}"
            (info / "entry_points.txt").write_text(f"[{discovery.GROUPS[role]}]\n{line}\n")
    sys.path.insert(0, str(folder))
    registry.refresh()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torch_zenith", *map(_package, EXAMPLES))]:
        del sys.modules[name]
    registry.refresh()


def _package(role: str) -> str:
    return f"drivetrain_{EXAMPLES[role]}"


def test_the_examples_are_short_and_complete(installed: Path) -> None:
    assert {path.partition("/")[0] for path in sources()} == set(map(_package, EXAMPLES))
    for path, text in sources().items():
        assert len(text.splitlines()) <= 55, path


def test_the_device_of_the_guide_keeps_the_rules(installed: Path) -> None:
    entry = registry.find("device", "zenith")
    device = registry.create(entry)
    hooks = Hooks(defaults)
    hooks.register(device, entry.origin)
    assert hooks.process_count(plan=None) == 2
    assert hooks.collectives(device_type="zenith") == "zccl"
    assert hooks.is_out_of_memory(run=None, error=RuntimeError("zenith: out of memory, 3 GB short")) is True
    assert device.present() is False
    assert [check.name for check in device.checks()] == ["driver"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_backend_and_the_precision_of_the_guide_train(installed: Path) -> None:
    checks = [
        check for text in ("static: ", "one process on the whole batch", "last group") for check in matching(text)
    ]
    report = conform(Suite(backend="mirror", precision="short", device="cpu"), checks)
    assert not report.failed, report.details()
    assert len(report.of("passed")) >= 12
