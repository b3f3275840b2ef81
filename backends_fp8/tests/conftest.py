"""What every test of this member has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends_fp8.tests.recipes import settings
from drivetrain import Accelerator, state


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    """End the run that a test started in its own process."""
    yield
    state.reset()


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Accelerator]:
    """Makes an Accelerator with a configuration of its own: the name of a precision, and its section."""

    def make(precision: str = "fp8-torchao", section: dict[str, Any] | None = None, **more: Any) -> Accelerator:
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(settings(precision) | ({precision: section} if section else {})))
        monkeypatch.setenv("DRIVETRAIN_CONFIG", str(path))
        return Accelerator(**more)

    return make


def warm_up() -> None:
    """Import what takes long, so that no rank has to wait for another one in a collective."""
    import torchao.float8  # noqa: F401

    import drivetrain_ddp.replica  # noqa: F401
    import drivetrain_fsdp.fsdp2  # noqa: F401


@pytest.fixture(scope="session")
def ranks(worker_pool: Callable[[int], Any]) -> Callable[[int], Any]:
    """``ranks(2).run(function)`` runs it on two ranks that are warm."""
    worker_pool(3).run(warm_up, timeout=100)
    return worker_pool
