"""The section, what is refused in it, and what follows from it before the engine is touched."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.config import resolve
from drivetrain.errors import ConfigError
from drivetrain.plugin import Policy
from drivetrain_xla import MeshConfig, Xla, XlaConfig
from drivetrain_xla.mesh import axis_sizes


def read(section: dict[str, Any]) -> XlaConfig:
    settings = {f"xla.{name}": value for name, value in section.items()}
    return resolve(command_line=settings, environment={}).section("xla", XlaConfig)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mesh": {"fsdp": 2}}, "mesh: no effect without spmd: true"),
        ({"partition": {"a": ["model"]}}, "partition: no effect without spmd: true"),
        ({"spmd": True, "partition": {"a(": ["model"]}}, "no regular expression"),
        ({"spmd": True, "partition": {"a": ["modle"]}}, "'modle' is no axis of the mesh"),
        ({"spmd": True, "mesh": {"fsdp": 0}}, "mesh.fsdp"),
        ({"spmd": True, "mesh": {"fspd": 2}}, "fspd"),
        ({"spmd": True, "fsdp_blocks": ["B"]}, "fsdp_blocks: no effect without an axis fsdp in mesh"),
        ({"cpu_devices": 4}, "cpu_devices: no effect without runtime: CPU"),
    ],
)
def test_what_can_not_be_followed_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        read(section)


def test_a_section_is_read() -> None:
    found = read({"spmd": True, "mesh": {"fsdp": 2}, "partition": {"w": ["model", None]}, "fsdp_blocks": ["B"]})
    assert found == XlaConfig(spmd=True, mesh=MeshConfig(fsdp=2), partition={"w": ("model", None)}, fsdp_blocks=("B",))


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        ({}, 4, (4, 1, 1)),
        ({}, 1, (1, 1, 1)),
        ({"fsdp": 2}, 8, (4, 2, 1)),
        ({"fsdp": 2, "model": 4}, 8, (1, 2, 4)),
        ({"data": 2, "model": 2}, 4, (2, 1, 2)),
    ],
)
def test_the_data_axis_takes_what_the_others_leave(mesh: dict[str, int], devices: int, sizes: tuple[int, ...]) -> None:
    assert tuple(axis_sizes(MeshConfig(**mesh), devices).values()) == sizes


@pytest.mark.parametrize("mesh", [{"fsdp": 3}, {"data": 2}, {"model": 8}, {"data": 4, "fsdp": 2}])
def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_what_fits(mesh: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"does not make 4 device\(s\).* one of 1, 2, 4"):
        axis_sizes(MeshConfig(**mesh), 4)


def test_several_processes_are_claimed_only_where_the_runtime_can_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert Xla().capabilities.many_processes
    assert Xla(XlaConfig(runtime="TPU")).capabilities.many_processes
    assert not Xla(XlaConfig(runtime="CPU")).capabilities.many_processes
    assert not Xla(XlaConfig(spmd=True)).capabilities.many_processes
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not Xla().capabilities.many_processes


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(compute="float16", loss_scale="dynamic"), "no scaling of losses"),
        (Policy(compute="float16"), "bfloat16"),
        (Policy(compute="bfloat16", converted="float8_e4m3fn"), "no kernels under XLA"),
    ],
)
def test_a_precision_without_a_counterpart_is_refused(policy: Policy, words: str) -> None:
    assert words in str(Xla().refuses(policy, "xla"))


@pytest.mark.parametrize("policy", [Policy(), Policy(compute="bfloat16")])
def test_full_precision_and_bfloat16_are_accepted(policy: Policy) -> None:
    assert Xla().refuses(policy, "xla") is None
