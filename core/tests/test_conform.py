"""The conformance kit finds what is wrong with a plugin, by the check that is about it, and passes what is right."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from drivetrain import discovery, registry
from drivetrain.cli import main
from drivetrain.errors import ConfigError, PluginNotFoundError
from drivetrain.plugin import Plugin
from drivetrain.testing.conformance.checks import GROUPS, ConformanceCheck, Violation, all_checks, matching
from drivetrain.testing.conformance.report import Outcome, Report
from drivetrain.testing.conformance.session import Conformance, Workers, conform
from drivetrain.testing.conformance.subject import Suite
from drivetrain.testing.pool import WorkerPool

SOURCE = Path(__file__).with_name("broken_plugins.py")
WHOLE_BATCH = "losses and weights are those of one process on the whole batch"
HEAVY = '''
"""Imports torch where it should not."""

import torch

from drivetrain.plugin import Backend


class Heavy(Backend):
    """Costs seconds to be listed."""

    api = (1, 0)
'''
CRASHING = '''
"""A module that can't be imported in a fresh process, though it was in this one."""

import sys

from drivetrain.plugin import Backend

if not hasattr(sys, "conformance_test"):
    raise ImportError("libvendor.so: cannot open shared object file")


class Crashing(Backend):
    """Works on one machine."""

    api = (1, 0)
'''


class SharedWorkers(Workers):
    """The same processes for all plugins of this file: each is wrong in a way that does not outlive its run."""

    def get(self, size: int, environment: Mapping[str, str], plugins: Any) -> WorkerPool:
        return super().get(3, {}, None)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorkers]:
    """Worker processes that see the plugins of ``broken_plugins.py`` as installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / SOURCE.name).write_text(SOURCE.read_text("utf-8"), "utf-8")
    (folder / "heavy_plugin.py").write_text(HEAVY)
    (folder / "crashing_plugin.py").write_text(CRASHING)
    sys.path.insert(0, str(folder))
    sys.conformance_test = True  # type: ignore[attr-defined]
    _install(folder)
    registry.refresh()
    workers = SharedWorkers()
    yield workers
    workers.close()
    sys.path.remove(str(folder))
    del sys.conformance_test  # type: ignore[attr-defined]
    for name in ("broken_plugins", "heavy_plugin", "crashing_plugin"):
        sys.modules.pop(name, None)
    registry.refresh()


def _install(folder: Path) -> None:
    """Write what an installer would have written."""
    import broken_plugins

    points: dict[str, list[str]] = {role: [] for role in ("backend", "precision")}
    for name, found in vars(broken_plugins).items():
        if inspect.isclass(found) and issubclass(found, Plugin) and found.__module__ == "broken_plugins":
            points[found.role].append(f"{name} = broken_plugins:{name}")
    points["backend"] += ["Heavy = heavy_plugin:Heavy", "Crashing = crashing_plugin:Crashing"]
    info = folder / "broken_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugins\nVersion: 1.0\n")
    groups = [f"[{discovery.GROUPS[role]}]\n" + "\n".join(lines) + "\n" for role, lines in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))


def examine(workers: Workers, check: str, size: int = 2, precision: str | None = None, **plugins: str) -> Outcome:
    """The outcome of one check."""
    (found,) = matching(check)
    suite = Suite(**plugins, precision=precision, sizes=(size,) if "backend" in plugins else None)
    (outcome,) = conform(suite, [found], workers=workers).outcomes
    return outcome


# --------------------------------------------------------------------------------------- what is wrong is found

STATIC = [
    ("ComputedApi", "the API version is a literal", "is computed"),
    ("InheritsApi", "the API version is a literal", "inherits api"),
    ("Undocumented", "the class says in a sentence", "has no docstring"),
    ("Unhashable", "an instance is hashable", "unhashable"),
    ("NoHelp", "every setting has a default and a help text", "NoHelp.level has no help"),
    ("NoDefault", "every setting has a default and a help text", "NoDefault.level has no default"),
    ("NoDefault", "its section can be left out", "can't be built from an empty section"),
    ("NoRoundTrip", "its section can be left out", "are read back as"),
    ("ChecksRaise", "checks() never raises", "OSError: no such library"),
    ("ChecksAreTexts", "checks() never raises", "'fine'"),
    ("Heavy", "the entry module imports neither", "imports torch"),
    ("Crashing", "the entry module imports neither", "libvendor.so"),
    ("KnowsNoCheck", "every known defect names a check", "it brews coffee"),
]


@pytest.mark.parametrize(("backend", "check", "reason"), STATIC, ids=lambda value: value)
def test_a_class_that_is_wrong_fails_the_check_about_it(
    workers: SharedWorkers, backend: str, check: str, reason: str
) -> None:
    outcome = examine(workers, check, size=1, backend=backend)
    assert outcome.status == "failed"
    assert reason in outcome.detail
    assert outcome.size is None


ALONE = [
    ("NeverSteps", WHOLE_BATCH, "losses of rank 0 should be"),
    ("StepsTwice", WHOLE_BATCH, "losses of rank 0 should be"),
    ("DividesAgain", "accumulated micro-batches give the gradient", "losses of rank 0 should be"),
    ("KeepsGradients", "zero_grad clears a bad batch", "w after x=1"),
    ("Unties", "tied weights stay tied", ""),
    ("OneGroup", "parameter groups keep their members", "losses of rank 0 should be"),
    ("ClipIgnored", "gradients are clipped by the global 2-norm", ""),
    ("ClipRemembered", "gradients are clipped by the global 2-norm", ""),
    ("ClipAlwaysTwo", "gradients are clipped by the global 1-norm", "norms of the gradients on rank 0"),
    ("ClipAlwaysTwo", "gradients are clipped by the global maximum norm", "norms of the gradients on rank 0"),
    ("ClipValueIgnored", "gradients are clipped by value", ""),
    ("ClaimsNoSubsets", "a part of a model is clipped alone", "but went through"),
    ("ClipsWhole", "a part of a model is clipped alone", "norms of the gradients"),
    ("ClaimsInfNorm", "gradients are clipped by the global maximum norm", "only the 2-norm"),
    ("LeavesOptimizer", "the optimizer holds the parameters that are trained", "none of the prepared model's"),
    ("Prefixes", "the full state dict has the names", "module.0.weight"),
    ("HalfState", "save_model writes the full weights", "saved weights deviate"),
    ("DropsLast", "each sample of a map is seen once", "samples that gather_for_metrics gave"),
    ("DropsLast", "each sample of a stream is seen once", "samples that gather_for_metrics gave"),
    ("NoWorld", "the run comes up", "no cable"),
]


@pytest.mark.parametrize(("backend", "check", "reason"), ALONE, ids=lambda value: value[:30])
def test_one_process_that_does_the_wrong_thing_fails_the_check_about_it(
    workers: SharedWorkers, backend: str, check: str, reason: str
) -> None:
    outcome = examine(workers, check, size=1, backend=backend)
    assert outcome.status == "failed", outcome
    assert reason in outcome.detail


TOGETHER = [
    ("SumsGradients", WHOLE_BATCH, "losses of rank 0 should be"),
    ("StepsAlone", WHOLE_BATCH, ""),
    ("Prefixes", "unwrap_model gives a module with the parameter names", "has no attribute `0`"),
    ("ClaimsShards", "a rank holds a part of the parameters", "each should hold a part"),
    ("SameShard", "each sample of a map is seen once", ""),
    ("ClaimsUneven", "ranks may run out of batches", "different numbers of batches"),
    ("Nameless", "several shards have a distributed type", "'NO'"),
    ("GathersReversed", "gather joins tensors of all ranks", "gather of float32"),
    ("MeanIsSum", "reduce takes sum, mean", "reduce(mean) of float32"),
    ("ReducesInPlace", "reduce takes sum, mean", ""),
    ("BroadcastsFromZero", "broadcast sends tensors and objects", "what rank 0 got"),
]


@pytest.mark.parametrize(("backend", "check", "reason"), TOGETHER, ids=lambda value: value[:30])
def test_two_processes_that_do_the_wrong_thing_fail_the_check_about_it(
    workers: SharedWorkers, backend: str, check: str, reason: str
) -> None:
    outcome = examine(workers, check, backend=backend)
    assert outcome.status == "failed", outcome
    assert reason in outcome.detail


def test_a_claim_to_compute_natively_is_put_to_the_test(workers: SharedWorkers) -> None:
    outcome = examine(workers, "models compute in the dtype", size=1, backend="ClaimsNative", precision="bf16")
    assert outcome.status == "failed"
    assert "claims to compute natively in bfloat16: expected 'torch.bfloat16', got 'torch.float32'" in outcome.detail
    assert examine(workers, "models compute in", size=1, backend="ClaimsNative").status == "passed"


def test_a_claim_to_scale_losses_is_put_to_the_test(workers: SharedWorkers) -> None:
    overflows = "an update whose gradients overflow"
    assert examine(workers, overflows, size=1, backend="ClaimsScaler", precision="fp16").status == "failed"
    assert examine(workers, overflows, size=1, backend="Right", precision="fp16").status == "passed"


def test_a_claim_to_load_with_another_number_of_processes_is_put_to_the_test(workers: SharedWorkers) -> None:
    outcome = examine(workers, "another number of processes can load", size=1, backend="ClaimsResharding")
    assert outcome.status == "failed"
    assert "saved by another number of processes" in outcome.detail


def test_a_precision_that_trains_nothing_fails_its_own_check(workers: SharedWorkers) -> None:
    outcome = examine(workers, "Freezing trains to a falling loss", precision="Freezing")
    assert outcome.status == "failed"
    assert "the loss does not fall on rank 0" in outcome.detail


def test_a_precision_that_refuses_passes_if_it_says_why(workers: SharedWorkers) -> None:
    assert examine(workers, "Picky trains to a falling loss", precision="Picky").status == "passed"
    assert examine(workers, WHOLE_BATCH, precision="Picky").detail.endswith("it wants a device from the future")


def test_a_launcher_that_hides_a_failure_is_found(workers: SharedWorkers) -> None:
    outcome = examine(workers, "the exit code of a rank is passed on", size=1, backend="AlwaysFine")
    assert outcome.status == "failed"
    assert "expected 7, got 0" in outcome.detail


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


# ------------------------------------------------------------------------------------------------- what is right passes


def test_a_backend_that_is_right_fails_nothing(workers: SharedWorkers) -> None:
    groups = tuple(group for group in GROUPS if group not in ("launch", "state"))
    report = conform(Suite(backend="Right", sizes=(2,), groups=groups), workers=workers)
    broken = {
        "precision: Freezing trains to a falling loss, or is refused with its reason before anything is allocated"
    }
    assert {str(outcome.check) for outcome in report.of("failed")} == broken, report.details()
    assert len(report.of("passed")) > 40


# -------------------------------------------------------------------------------------------------------- known defects


def test_a_known_defect_is_shown_and_does_not_fail(workers: SharedWorkers) -> None:
    outcome = examine(workers, WHOLE_BATCH, size=1, backend="KnowsItsDefect")
    assert (outcome.status, outcome.detail) == ("known", "the engine is on holiday")


def test_a_known_defect_that_is_gone_fails(workers: SharedWorkers) -> None:
    outcome = examine(workers, WHOLE_BATCH, size=1, backend="KnowsTooMuch")
    assert outcome.status == "failed"
    assert "declares it as failing (the engine was on holiday); take it out" in outcome.detail


def test_a_defect_known_with_one_precision_is_expected_with_that_alone(workers: SharedWorkers) -> None:
    assert examine(workers, WHOLE_BATCH, size=1, backend="KnowsWithBf16").status == "passed"
    assert examine(workers, WHOLE_BATCH, size=1, backend="KnowsWithBf16", precision="bf16").status == "failed"


# ------------------------------------------------------------------------------------------- suites, checks, and report


def test_a_suite_of_one_name_finds_its_role() -> None:
    assert Suite.of("single") == Suite(backend="single")
    assert Suite.of("cpu") == Suite(device="cpu")
    assert Suite.of("bf16") == Suite(precision="bf16")
    with pytest.raises(PluginNotFoundError, match="did you mean 'single'"):
        Suite.of("singel")
    with pytest.raises(ConfigError, match="at least one plugin"):
        Suite()


def test_the_worlds_of_a_suite_follow_from_what_the_backend_claims(workers: SharedWorkers) -> None:
    assert Conformance("single", workers).sizes == (1,)
    assert Conformance("Right", workers).sizes == (1, 2)
    assert Conformance(Suite(backend="Right", sizes=(3,)), workers).sizes == (3,)
    with pytest.raises(ConfigError, match="works with one process only, so it can't be examined with 2"):
        Conformance(Suite(backend="single", sizes=(2,)), workers)


def test_a_world_that_does_not_come_up_is_reported_once_and_the_rest_is_left_out(workers: SharedWorkers) -> None:
    checks = matching("the run comes up") + matching(WHOLE_BATCH)
    report = conform(Suite(backend="NoWorld", sizes=(1,)), checks, workers=workers)
    assert [outcome.status for outcome in report.outcomes] == ["failed", "skipped"]
    assert report.outcomes[1].detail == "the world does not come up"


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


# -------------------------------------------------------------------------------------------------------- the command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["conform", *arguments], prog_name="drivetrain")


def test_the_command_ends_with_0_and_a_table_if_all_is_well() -> None:
    result = invoke("--backend", "single", "-k", "the API version")
    assert result.exit_code == 0, result.output
    assert "backend single: passed 1, skipped 0 (not claimed), known 0, failed 0" in result.output


def test_the_command_ends_with_1_and_the_reason_if_a_check_fails(workers: SharedWorkers) -> None:
    result = invoke("--backend", "ComputedApi", "-k", "the API version", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["failed"], found["counts"]) == (True, {"static": {"failed": 1}})
    assert "write a literal" in found["outcomes"][0]["detail"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name what to examine"),
        (("--backend", "singel"), "did you mean 'single'"),
        (("--backend", "single", "-k", "brews coffee"), "no check has 'brews coffee'"),
        (("--backend", "single", "--size", "2"), "works with one process only"),
        (("--backend", "single", "--size", "0"), "x>=1"),
        (("--backend", "single", "--set", "nonsense"), "is no KEY=VALUE"),
    ],
)
def test_the_command_ends_with_2_if_it_is_used_wrongly(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_the_command_lists_checks_without_running_any() -> None:
    result = invoke("--list", "-k", "cost:")
    assert (result.exit_code, result.output) == (0, "cost: hot hooks are bound to the plugin's own methods\n")


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom drivetrain.cli import main\n"
        "try: main(['conform', '--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


# -------------------------------------------------------------------------------------------------------------- pytest

SUITE = """
import pytest
from drivetrain.testing.suite import *


@pytest.fixture
def drivetrain_plugin():
    return Suite(backend="single", groups=("static",))
"""


def test_one_fixture_and_one_import_make_a_test_of_each_check(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", "-k", "static or launch"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    static = sum(check.group == "static" for check in all_checks())
    launch = sum(check.group == "launch" for check in all_checks())
    assert f"{static} passed, {launch} skipped" in done.stdout, done.stdout
    assert "conformance: backend single" in done.stdout
    assert f"static        {static}" in done.stdout


def test_a_violation_is_no_error_of_the_kit() -> None:
    assert issubclass(Violation, AssertionError)
