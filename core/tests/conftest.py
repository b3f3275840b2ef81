"""What several test files of the core share."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from drivetrain import discovery, registry


@attrs.define
class FakeSite:
    """A directory on ``sys.path`` into which a test installs made-up distributions."""

    directory: Path

    def install(
        self,
        distribution: str,
        *,
        version: str = "1.0",
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        requires: Sequence[str] = (),
        extras: Sequence[str] = (),
        modules: Mapping[str, str] | None = None,
    ) -> Path:
        """Write what an installer would have written, and return the directory of the metadata."""
        info = self.directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        metadata += [f"Provides-Extra: {extra}" for extra in extras]
        metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(metadata) + "\n")
        lines = []
        for group, points in (entry_points or {}).items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in (modules or {}).items():
            (self.directory / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        registry.refresh()
        return info

    def install_backend(self, name: str, body: str = "", *, module: str | None = None, **options: object) -> Path:
        """A distribution ``<name>-dist`` with one backend; ``body`` is what its class holds beside ``api``."""
        return self._install_plugin("backend", "Backend", name, body, module, options)

    def install_device(self, name: str, body: str = "", *, module: str | None = None, **options: object) -> Path:
        """The same with a device."""
        return self._install_plugin("device", "Device", name, body, module, options)

    def install_precision(self, name: str, body: str = "", *, module: str | None = None, **options: object) -> Path:
        """The same with a precision."""
        return self._install_plugin("precision", "Precision", name, body, module, options)

    def _install_plugin(
        self, role: str, base: str, name: str, body: str, module: str | None, options: dict[str, object]
    ) -> Path:
        importable = f"fake_{role}_{name.replace('-', '_')}"
        source = f"from drivetrain.plugin import *\nclass Plug({base}):\n    api = (1, 0)\n"
        source += textwrap.indent(textwrap.dedent(body), "    ")
        return self.install(
            str(options.pop("distribution", f"{name}-dist")),
            entry_points={discovery.GROUPS[role]: {name: f"{importable}:Plug"}},
            modules={importable: module if module is not None else source},
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture
def fresh_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No run from the test before, none left for the next one, and no settings from outside."""
    from drivetrain import state

    for name in [name for name in os.environ if name.startswith("DRIVETRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DRIVETRAIN_HOME", str(tmp_path / "home"))
    state.reset()
    yield
    state.reset()


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is slow, and seen only when the power fails."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def notes_of() -> Callable[[BaseException], list[str]]:
    """Reads the notes of an exception; on Python 3.10 they are the later lines of its message."""
    return lambda error: getattr(error, "__notes__", None) or str(error).splitlines()[1:]


@pytest.fixture
def open_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A site beside everything that is really installed here."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    yield FakeSite(directory)
    _forget(directory, monkeypatch)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A site in which nothing but a made-up core is installed; what the real environment holds is not seen."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr(
        discovery, "_distributions", lambda: iter(importlib.metadata.distributions(path=[str(directory)]))
    )
    site = FakeSite(directory)
    site.install(
        "drivetrain",
        version="0.1.0",
        extras=["alpha", "beta", "dev", "narrow"],
        requires=[
            "attrs",
            'drivetrain-alpha==0.1.0; extra == "alpha"',
            'drivetrain-beta==0.1.0; extra == "beta"',
            'drivetrain-narrow==0.1.0; extra == "narrow"',
            'pytest; extra == "dev"',
        ],
        entry_points={"drivetrain.extras": {"alpha": "backend", "beta": "backend", "narrow": "precision"}},
    )
    yield site
    _forget(directory, monkeypatch)


def _forget(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]
    monkeypatch.undo()
    registry.refresh()
