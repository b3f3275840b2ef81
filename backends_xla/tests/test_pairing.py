"""torch and torch_xla are compared before either is imported, and doctor says what is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain.errors import EngineError
from drivetrain_xla import Xla, checks, pairing


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that are thought to be installed."""
    versions: dict[str, str] = {}
    for module in (pairing, checks):
        monkeypatch.setattr(module, "installed_version", versions.get)
    return versions


@pytest.mark.parametrize(
    ("torch", "engine"), [("2.9.1", "2.9.0"), ("2.9.0+cpu", "2.9.0"), ("2.10.0", "2.10.1"), ("2.9.0", "2.9.0.dev2")]
)
def test_one_minor_version_is_a_pair(installed: dict[str, str], torch: str, engine: str) -> None:
    installed |= {"torch": torch, "torch_xla": engine}
    assert pairing.mismatch() is None


@pytest.mark.parametrize(("torch", "engine"), [("2.13.0", "2.9.0"), ("2.8.0", "2.9.0"), ("3.9.0", "2.9.0")])
def test_a_pair_that_can_not_load_is_refused_with_both_versions_and_the_cure(
    installed: dict[str, str], torch: str, engine: str
) -> None:
    installed |= {"torch": torch, "torch_xla": engine}
    with pytest.raises(EngineError, match=rf"torch_xla {engine} works with torch 2\.9 only, and torch is {torch}.*pip"):
        pairing.check_pair()


def test_a_missing_engine_is_refused_with_what_to_install(installed: dict[str, str]) -> None:
    installed |= {"torch": "2.9.1"}
    with pytest.raises(EngineError, match=r'not installed. pip install "drivetrain\[xla\]"'):
        pairing.check_pair()


def test_doctor_says_what_is_found_and_what_to_install(installed: dict[str, str]) -> None:
    installed |= {"torch": "2.13.0", "torch_xla": "2.9.0", "torch_tpu": "0.1"}
    rows = {row.name: row for row in Xla.checks()}
    assert rows["torch_xla"].ok is False
    assert "torch==2.9.*" in rows["torch_xla"].fix
    assert rows["libtpu"].ok is None
    assert "torch_xla[tpu]" in rows["libtpu"].fix
    assert rows["torch_tpu"].ok
    assert "device: auto with ddp or fsdp" in rows["torch_tpu"].detail


def test_the_entry_point_imports_neither_torch_nor_the_engine() -> None:
    code = "import sys, drivetrain_xla; print({'torch', 'torch_xla', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
