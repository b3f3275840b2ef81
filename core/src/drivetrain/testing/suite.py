"""The conformance kit under pytest, for the authors of plugins. The whole test of a plugin is this file::

    import pytest
    from drivetrain.testing.suite import *

    @pytest.fixture(scope="session")
    def drivetrain_plugin():
        return "acme"                      # its name; or a Suite(backend=..., device=..., precision=..., sizes=...)

Every check of the kit becomes a test. Those that the plugin does not claim are skipped with the reason, its known
defects are expected failures, and a table is printed at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from drivetrain.testing.conformance.checks import ConformanceCheck, all_checks
from drivetrain.testing.conformance.report import STATUSES, Outcome, Report
from drivetrain.testing.conformance.session import Conformance, Workers
from drivetrain.testing.conformance.subject import Suite

__all__ = ["Suite", "drivetrain_conformance", "drivetrain_conformance_sessions", "test_conformance"]


@attrs.define(eq=False)
class _Sessions:
    """The suite under examination: one at a time, so that its worker processes don't outlive its turn."""

    reports: list[Report] = attrs.field(factory=list)
    workers: Workers = attrs.field(factory=Workers)
    current: Conformance | None = None

    def of(self, plugin: str | Suite) -> Conformance:
        """The session of a plugin or suite, begun if it is not the current one."""
        suite = Suite.of(plugin)
        if self.current is None or self.current.suite != suite:
            self.end()
            self.current = Conformance(suite, self.workers)
            self.current.warm_up()
            self.reports.append(self.current.report)
        return self.current

    def end(self) -> None:
        """End the current session; the next may use its workers, if it examines the same backend and device."""
        if self.current is not None:
            self.current.close()
            self.current = None

    def close(self) -> None:
        """End everything."""
        self.end()
        self.workers.close()

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the tables."""
        for report in self.reports:
            terminalreporter.section(f"conformance: {report.title}")
            lines = [("", *STATUSES), *report.rows()]
            for line in lines:
                terminalreporter.write_line("".join(f"{cell:<14}" for cell in line).rstrip())


@pytest.fixture(scope="session")
def drivetrain_conformance_sessions(request: pytest.FixtureRequest) -> Iterator[_Sessions]:
    """Keeps the worker processes of the suite whose turn it is."""
    sessions = _Sessions()
    request.config.pluginmanager.register(sessions)
    yield sessions
    sessions.close()


@pytest.fixture
def drivetrain_conformance(drivetrain_conformance_sessions: _Sessions, drivetrain_plugin: str | Suite) -> Conformance:
    """The suite that the fixture ``drivetrain_plugin`` names, ready to run checks."""
    return drivetrain_conformance_sessions.of(drivetrain_plugin)


@pytest.mark.parametrize("check", all_checks(), ids=str)
def test_conformance(drivetrain_conformance: Conformance, check: ConformanceCheck) -> None:
    """One check of the kit."""
    __tracebackhide__ = True
    groups = drivetrain_conformance.suite.groups
    if groups is not None and check.group not in groups:
        pytest.skip(f"the suite leaves the group {check.group} out")
    _tell(drivetrain_conformance.run(check))


def _tell(outcomes: list[Outcome]) -> None:
    """Outcomes in the words of pytest."""
    __tracebackhide__ = True
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        pytest.fail("\n".join(f"{one}\n{one.trace}".rstrip() for one in failed), pytrace=False)
    known = [outcome for outcome in outcomes if outcome.status == "known"]
    if known:
        pytest.xfail(known[0].detail)
    if all(outcome.status == "skipped" for outcome in outcomes):
        pytest.skip("; ".join(dict.fromkeys(outcome.detail for outcome in outcomes)))
