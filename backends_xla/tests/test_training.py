"""Training with the engine against plain torch on the CPU: one device, and meshes of four."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backends_xla.tests.recipes import by_hand, close, net, settings, train

Runner = Callable[..., Any]

pytestmark = pytest.mark.timeout(240)  # more than any process here is given

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (4, {}),
    "fsdp": (4, {"mesh": {"fsdp": 4}}),
    "data x fsdp": (4, {"mesh": {"data": 2, "fsdp": 2}}),
    "data x model": (
        2,
        {"mesh": {"model": 2}, "partition": {"first.weight": ["model", None], "first.bias": ["model"]}},
    ),
    "fsdp x model": (2, {"mesh": {"fsdp": 2, "model": 2}, "partition": {r"first\.weight": ["model", None]}}),
}
"""By name: over how many shards the samples are divided, and the section."""


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    shards, section = MESHES[request.param]
    return shards, {"spmd": True, **section}


def same(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    for theirs, ours in zip(found[:2], expected[:2], strict=True):
        assert theirs == pytest.approx(ours, abs=10 * tolerance, rel=10 * tolerance)
    close(found[2], expected[2], tolerance)


@pytest.mark.parametrize("steps", [1, 3])
def test_one_device_trains_as_plain_torch(on_one_device: Runner, steps: int) -> None:
    same(on_one_device(train, 2, steps, config=settings()), by_hand(epochs=2, steps=steps))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_mesh_trains_as_plain_torch_on_the_joined_batches(
    on_a_mesh: Runner, mesh: tuple[int, dict[str, Any]], steps: int
) -> None:
    shards, section = mesh
    same(on_a_mesh(train, 2, steps, config=settings(**section)), by_hand(shards, epochs=2, steps=steps))


def test_one_device_follows_plain_torch_in_bfloat16(on_one_device: Runner) -> None:
    losses, _norms, weights = on_one_device(train, 2, config=settings("bf16"))
    expected = by_hand(epochs=2, dtype=torch.bfloat16)
    assert losses == pytest.approx(expected[0], rel=0.03)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    close(weights, expected[2], 0.03)
    assert losses != pytest.approx(by_hand(epochs=2)[0], rel=1e-5)


def test_a_mesh_follows_plain_torch_in_bfloat16(on_a_mesh: Runner, mesh: tuple[int, dict[str, Any]]) -> None:
    shards, section = mesh
    losses, _norms, weights = on_a_mesh(train, 2, config=settings("bf16", **section))
    expected = by_hand(shards, epochs=2, dtype=torch.bfloat16)
    assert losses == pytest.approx(expected[0], rel=0.03)
    close(weights, expected[2], 0.03)


def test_a_state_is_continued_on_one_device_and_its_weights_are_read_without_the_engine(
    on_one_device: Runner, tmp_path: Path
) -> None:
    losses, _, weights = on_one_device(train, 2, config=settings())
    folder = str(tmp_path / "state")
    first = on_one_device(_half, folder, config=settings())
    assert first == pytest.approx(losses[: len(first)], rel=1e-6)
    second = on_one_device(_other_half, folder, config=settings())
    assert second == pytest.approx(losses[len(first) :], rel=1e-5)
    model = net(seed=5)
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"), strict=False)
    assert all(value.device.type == "cpu" for value in weights.values())


def _half(folder: str) -> list[float]:
    return train(1, folder=folder)[0]


def _other_half(folder: str) -> list[float]:
    return train(1, load=folder)[0]


def test_a_state_of_a_mesh_goes_on_under_another_mesh(on_a_mesh: Runner, tmp_path: Path) -> None:
    losses, _, _ = by_hand(4, epochs=2)
    folder = str(tmp_path / "state")
    first = on_a_mesh(_half, folder, config=settings(spmd=True, mesh={"fsdp": 4}))
    second = on_a_mesh(_other_half, folder, config=settings(spmd=True, mesh={"data": 2, "fsdp": 2}))
    assert first + second == pytest.approx(losses, rel=1e-5)
