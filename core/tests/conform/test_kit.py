"""The conformance kit itself: what is right passes, known defects are shown, and findings become a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.errors import ConfigError, PluginNotFoundError
from drivetrain.testing.conformance.checks import GROUPS, ConformanceCheck, Violation, all_checks, matching
from drivetrain.testing.conformance.report import Outcome, Report
from drivetrain.testing.conformance.session import Conformance, Workers, conform
from drivetrain.testing.conformance.subject import Suite

Examine = Callable[..., Outcome]
WHOLE_BATCH = "losses and weights are those of one process on the whole batch"

# ------------------------------------------------------------------------------------------------- what is right passes


@pytest.mark.timeout(300)  # a whole kit
def test_a_backend_that_is_right_fails_nothing(workers: Workers) -> None:
    groups = tuple(group for group in GROUPS if group not in ("launch", "state"))
    report = conform(Suite(backend="Right", sizes=(2,), groups=groups), workers=workers)
    broken = {
        "precision: Freezing trains to a falling loss, or is refused with its reason before anything is allocated"
    }
    assert {str(outcome.check) for outcome in report.of("failed")} == broken, report.details()
    assert len(report.of("passed")) > 40


def test_what_is_not_claimed_is_not_asked_for(examine: Examine) -> None:
    assert examine("models compute in", backend="ClaimsNative").status == "passed"
    assert examine("an update whose gradients overflow", backend="Right", precision="fp16").status == "passed"
    assert "scales no losses" in examine("an update whose gradients overflow", backend="Right").detail
    assert examine("gradients are reduced in the dtype", size=2, backend="Right").status == "skipped"


def test_a_precision_that_refuses_passes_if_it_says_why(examine: Examine) -> None:
    assert examine("Picky trains to a falling loss", precision="Picky").status == "passed"
    assert examine(WHOLE_BATCH, precision="Picky").detail.endswith("it wants a device from the future")


def test_of_checks_that_were_picked_one_says_why_the_world_did_not_come_up(workers: Workers) -> None:
    suite = Suite(backend="Fussy", sizes=(2,), settings={"Fussy": {"sizes": [3]}})
    report = conform(suite, matching("accumula"), workers=workers)
    (failed,) = report.of("failed")
    assert "2 processes are none of" in failed.detail
    assert len(report.of("skipped")) > 1


def test_a_number_of_processes_that_the_settings_rule_out_is_none_to_load_with(workers: Workers) -> None:
    (check,) = matching("another number of processes can load")

    def loaded(wanted: list[int]) -> Outcome:
        suite = Suite(backend="Fussy", sizes=(2,), settings={"Fussy": {"sizes": wanted}})
        (outcome,) = conform(suite, [check], workers=workers).outcomes
        return outcome

    assert loaded([2, 4]).status == "passed"
    assert loaded([2]).status == "skipped"
    assert loaded([2]).detail == "no other number of processes can be had here: 3 processes are none of [2]"


def test_a_detour_on_the_hot_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain import state
    from drivetrain.binding import Hooks
    from drivetrain.testing.conformance.cost import detours

    for name in ("RANK", "WORLD_SIZE", "DRIVETRAIN_CONFIG", "DRIVETRAIN_RESOLVED"):
        monkeypatch.delenv(name, raising=False)
    state.ensure({"device": "cpu"})
    try:
        assert detours() == []
        bind = Hooks.bind
        monkeypatch.setattr(Hooks, "bind", lambda self, name: lambda *args: bind(self, name)(*args))
        assert any(found.startswith("step is bound to") for found in detours())
    finally:
        state.reset()


# -------------------------------------------------------------------------------------------------------- known defects


def test_a_known_defect_is_shown_and_does_not_fail(examine: Examine) -> None:
    outcome = examine(WHOLE_BATCH, backend="KnowsItsDefect")
    assert (outcome.status, outcome.detail) == ("known", "the engine is on holiday")


def test_a_known_defect_that_is_gone_fails(examine: Examine) -> None:
    outcome = examine(WHOLE_BATCH, backend="KnowsTooMuch")
    assert outcome.status == "failed"
    assert "declares it as failing (the engine was on holiday); take it out" in outcome.detail


def test_a_defect_known_with_one_precision_is_expected_with_that_alone(examine: Examine) -> None:
    assert examine(WHOLE_BATCH, backend="KnowsWithBf16").status == "passed"
    assert examine(WHOLE_BATCH, backend="KnowsWithBf16", precision="bf16").status == "failed"


# ------------------------------------------------------------------------------------------- suites, checks, and report


def test_a_suite_of_one_name_finds_its_role() -> None:
    assert Suite.of("single") == Suite(backend="single")
    assert Suite.of("cpu") == Suite(device="cpu")
    assert Suite.of("bf16") == Suite(precision="bf16")
    with pytest.raises(PluginNotFoundError, match="did you mean 'single'"):
        Suite.of("singel")
    with pytest.raises(ConfigError, match="at least one plugin"):
        Suite()


def test_the_worlds_of_a_suite_follow_from_what_the_backend_claims(workers: Workers) -> None:
    assert Conformance("single", workers).sizes == (1,)
    assert Conformance("Right", workers).sizes == (1, 2)
    assert Conformance(Suite(backend="Right", sizes=(3,)), workers).sizes == (3,)
    with pytest.raises(ConfigError, match="works with one process only, so it can't be examined with 2"):
        Conformance(Suite(backend="single", sizes=(2,)), workers)


def test_a_world_that_does_not_come_up_is_reported_once_and_the_rest_is_left_out(workers: Workers) -> None:
    checks = matching("the run comes up") + matching(WHOLE_BATCH)
    report = conform(Suite(backend="NoWorld", sizes=(1,)), checks, workers=workers)
    assert [outcome.status for outcome in report.outcomes] == ["failed", "skipped"]
    assert report.outcomes[1].detail == "the world does not come up: rank 0 raised builtins.OSError: no cable"


def test_every_check_has_a_name_of_its_own_and_a_group() -> None:
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    assert {check.group for check in checks} == set(GROUPS)
    assert [check for check in matching("CLIPPED")] == [check for check in checks if "clipped" in check.name]


def test_the_table_counts_by_group_and_in_all() -> None:
    def outcome(group: str, status: Any) -> Outcome:
        return Outcome(ConformanceCheck(f"a {status} check", group, lambda subject: None), 1, status, "why")

    report = Report("backend x", [outcome("data", "passed"), outcome("data", "skipped"), outcome("cost", "known")])
    assert report.rows() == [("data", "1", "1", "0", "0"), ("cost", "0", "0", "1", "0"), ("all", "1", "1", "1", "0")]
    assert report.markdown().splitlines()[0] == "| group | passed | skipped | known | failed |"
    assert report.summary() == "backend x: passed 1, skipped 1 (not claimed), known 1, failed 0"
    assert not report.failed
    report.outcomes.append(outcome("cost", "failed"))
    assert report.failed
    assert "FAILED: cost: a failed check [1 process]\n    why" in report.details()


def test_the_checks_that_took_longest_come_first_and_all_are_added_up() -> None:
    def outcome(name: str, seconds: float) -> Outcome:
        return Outcome(ConformanceCheck(name, "data", lambda subject: None), 2, "passed", "why", seconds=seconds)

    report = Report("backend x", [outcome("quick", 0.25), outcome("slow", 12.0), outcome("between", 1.0)])
    assert report.durations(2).splitlines() == [
        "   12.0 s  data: slow [2 processes]",
        "    1.0 s  data: between [2 processes]",
        "   13.2 s  in all",
    ]


def test_the_first_check_of_a_world_has_brought_it_up(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Conformance._look
    monkeypatch.setattr(Conformance, "_look", lambda self, size: time.sleep(0.5) or begun(self, size))
    checks = matching("the run comes up") + matching("ranks, sizes and data shards")
    first, second = conform(Suite(backend="Right", sizes=(1,)), checks, workers=workers).outcomes
    assert first.seconds >= 0.5
    assert second.seconds > 0


def test_a_violation_is_no_error_of_the_kit() -> None:
    assert issubclass(Violation, AssertionError)
