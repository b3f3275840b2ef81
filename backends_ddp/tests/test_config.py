"""The section `ddp` and its handler: choices, contradictions and names."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest

from drivetrain_ddp import (
    Ddp,
    DDPCommunicationHookType,
    DdpConfig,
    DistributedDataParallelKwargs,
    PowerSgdConfig,
)


def test_importing_the_package_does_not_import_torch() -> None:
    script = "import sys, drivetrain_ddp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("config", [DdpConfig, PowerSgdConfig])
def test_every_setting_has_a_default_and_a_sentence_of_help(config: type) -> None:
    for field in attrs.fields(config):
        assert field.default is not attrs.NOTHING
        assert field.metadata["help"]


def test_several_processes_get_ddp_and_one_does_without() -> None:
    assert Ddp.default_for_many
    assert Ddp().capabilities.many_processes
    assert not Ddp().capabilities.one_process


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb"),
        ({"comm_hook": "fp8"}, "comm_hook"),
        ({"comm_wrapper": "fp16"}, "set comm_hook: fp16"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DdpConfig(**settings)  # type: ignore[arg-type]


def test_powersgd_may_not_start_before_the_buckets_are_settled() -> None:
    with pytest.raises(ValueError, match="start_powerSGD_iter must be at least 2"):
        PowerSgdConfig(start_powerSGD_iter=1)
    PowerSgdConfig(start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)


def test_a_handler_gives_only_what_was_said() -> None:
    assert DistributedDataParallelKwargs().settings() == {}
    assert DistributedDataParallelKwargs(find_unused_parameters=False, bucket_cap_mb=1).settings() == {
        "ddp.find_unused_parameters": False,
        "ddp.bucket_cap_mb": 1,
    }


def test_a_handler_translates_hooks_to_the_sections_names() -> None:
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_wrapper="fp16",
        comm_state_option={"matrix_approximation_rank": 2},
    )
    assert handler.settings() == {
        "ddp.comm_hook": "powersgd",
        "ddp.comm_wrapper": "fp16",
        "ddp.powersgd.matrix_approximation_rank": 2,
    }


@pytest.mark.parametrize("hook", DDPCommunicationHookType)
def test_every_hook_of_the_handler_is_a_choice_of_the_section(hook: DDPCommunicationHookType) -> None:
    DdpConfig(comm_hook=DistributedDataParallelKwargs(comm_hook=hook).settings()["ddp.comm_hook"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 1}, "dim=1"),
        ({"check_reduction": True}, "check_reduction=True"),
        ({"comm_hook": "fp8"}, "fp8"),
        ({"comm_wrapper": DDPCommunicationHookType.POWER_SGD}, "got POWER_SGD"),
        ({"comm_state_option": {"rank": 2}}, "no 'rank'"),
    ],
)
def test_a_handler_refuses_what_would_have_no_effect(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelKwargs(**settings)  # type: ignore[arg-type]


def test_defaults_of_options_without_effect_are_accepted() -> None:
    assert DistributedDataParallelKwargs(dim=0, check_reduction=False).settings() == {}
