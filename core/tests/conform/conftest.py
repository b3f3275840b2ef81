"""Made-up plugins, installed for the tests of this folder, and processes that know them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import discovery, registry
from drivetrain.plugin import Plugin
from drivetrain.testing.conformance.checks import matching
from drivetrain.testing.conformance.report import Outcome
from drivetrain.testing.conformance.session import Workers, conform
from drivetrain.testing.conformance.subject import Suite
from drivetrain.testing.pool import WorkerPool

HERE = Path(__file__).parent
MOST_PROCESSES = 4


class SharedWorkers(Workers):
    """The same processes for all plugins of these tests: each is wrong in a way that does not outlive its run."""

    def get(self, size: int, environment: Mapping[str, str], plugins: Any) -> WorkerPool:
        return super().get(MOST_PROCESSES, {}, None)


@pytest.fixture(scope="package")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorkers]:
    """Worker processes that see the plugins of ``broken_plugins`` as installed."""
    folder = tmp_path_factory.mktemp("site")
    paths = [str(folder), str(HERE)]
    sys.path[:0] = paths
    sys.conformance_test = True  # type: ignore[attr-defined]
    _install(folder)
    registry.refresh()
    workers = SharedWorkers()
    yield workers
    workers.close()
    for path in paths:
        sys.path.remove(path)
    del sys.conformance_test  # type: ignore[attr-defined]
    for name in list(sys.modules):
        if name.partition(".")[0] == "broken_plugins":
            del sys.modules[name]
    registry.refresh()


def _install(folder: Path) -> None:
    """Write what an installer would have written."""
    import broken_plugins

    points: dict[str, list[str]] = {role: [] for role in ("backend", "precision")}
    for found in pkgutil.iter_modules(broken_plugins.__path__):
        module = importlib.import_module(f"broken_plugins.{found.name}")
        for name, plugin in vars(module).items():
            if inspect.isclass(plugin) and issubclass(plugin, Plugin) and plugin.__module__ == module.__name__:
                points[plugin.role].append(f"{name} = {module.__name__}:{name}")
    info = folder / "broken_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugins\nVersion: 1.0\n")
    groups = [f"[{discovery.GROUPS[role]}]\n" + "\n".join(lines) + "\n" for role, lines in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def examine(workers: SharedWorkers) -> Callable[..., Outcome]:
    """Runs one check: ``examine("a part of its name", size=1, backend="Right", precision="bf16")``."""

    def one(check: str, size: int = 1, precision: str | None = None, **plugins: str) -> Outcome:
        (found,) = matching(check)
        suite = Suite(**plugins, precision=precision, sizes=(size,) if "backend" in plugins else None)
        (outcome,) = conform(suite, [found], workers=workers).outcomes
        return outcome

    return one
