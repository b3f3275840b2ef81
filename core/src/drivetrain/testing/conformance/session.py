"""Runs the checks of a suite: brings up its worlds once, and turns what happens into outcomes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from drivetrain import registry
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.plugin import Capabilities
from drivetrain.registry import Entry
from drivetrain.runtime import create
from drivetrain.testing.conformance.checks import ConformanceCheck, Violation, all_checks
from drivetrain.testing.conformance.report import Outcome, Report
from drivetrain.testing.conformance.subject import Facts, Pair, Subject, Suite
from drivetrain.testing.conformance.world import look, pairs
from drivetrain.testing.pool import WorkerError, WorkerPool

__all__ = ["Conformance", "Workers", "conform"]


class Workers:
    """The worker processes of suites that are examined one after the other: shared as long as their needs are equal."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._needs: tuple[Any, ...] = ()

    def get(self, size: int, environment: Mapping[str, str], plugins: Any) -> WorkerPool:
        """A pool. Whatever was handed out for other needs is closed.

        Args:
            size: Least number of workers. They start when a task first needs them.
            environment: Variables to start with.
            plugins: What must be equal, so that no engine meets what another has left in a process.
        """
        needs = (dict(environment), plugins)
        if self._pool is None or self._needs != needs or self._pool.size < size:
            self.close()
            self._pool, self._needs = WorkerPool(size, environment), needs
        return self._pool

    def close(self) -> None:
        """End them."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@attrs.define(eq=False)
class _World:
    """What was found out about a world of the suite when it was first needed."""

    pairs: dict[str, Pair] = attrs.field(factory=dict)
    everyone: list[Facts] = attrs.field(factory=list)
    trouble: str = ""
    """Why it did not come up."""
    trace: str = ""
    told: bool = False
    """Whether a check has failed for that reason. Others are skipped, but of those that were picked one must say it."""
    refusal: str = ""
    """Why the suite's precision can't work with its backend and device, by its own word."""


class Conformance:
    """A suite under examination. Its worker processes start with the first check that needs them.

    Args:
        suite: What is examined, or the name of an installed plugin.
        workers: Where worker processes come from; None: its own.

    Raises:
        DrivetrainError: A plugin is not installed or broken, or can't run in a world of a size that was asked for.
    """

    def __init__(self, suite: Suite | str, workers: Workers | None = None) -> None:
        self.suite = Suite.of(suite)
        self.plugins = [(entry, registry.load(entry)) for entry in self.suite.entries()]
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-conform-")
        self._workers = workers or Workers()
        self._owns_workers = workers is None
        self._worlds: dict[int, _World] = {}
        self._environment: dict[str, str] | None = None
        self._shared: dict[str, Any] = {}
        self.sizes = self._choose_sizes()
        """Processes of the worlds checks run in, ascending."""
        self.report = Report(str(self.suite))
        """Everything found so far."""

    def _choose_sizes(self) -> tuple[int, ...]:
        """The suite's own choice, if the backend can be had in it; else what suits the backend."""
        if self.suite.backend is None:
            return tuple(sorted(self.suite.sizes or (1,)))
        entry = registry.find("backend", self.suite.backend)
        claims = self._claims(entry)
        able = [size for size, can in ((1, claims.one_process), (2, claims.many_processes)) if can]
        for size in self.suite.sizes or ():
            if min(size, 2) not in able:
                works = "several processes" if claims.many_processes else "one process"
                raise ConfigError(f"{entry} works with {works} only, so it can't be examined with {size}")
        return tuple(sorted(self.suite.sizes or able))

    def _claims(self, entry: Entry) -> Capabilities:
        """What a backend claims with the suite's settings; if it can't be asked, the check of its world says why."""
        resolved = self.suite.resolved(Path(self._folder.name))
        try:
            claims: Capabilities = create(entry, resolved).capabilities
            return claims
        except Exception:
            if self.suite.settings:
                raise  # these may be what is wrong
            return Capabilities()

    def checks(self) -> tuple[ConformanceCheck, ...]:
        """The checks of the suite's groups."""
        return tuple(check for check in all_checks() if self.suite.groups is None or check.group in self.suite.groups)

    # ----------------------------------------------------------------------------------------------- running checks

    def run(self, check: ConformanceCheck) -> list[Outcome]:
        """Run one check in every world it is for, and add what was found to the report."""
        sizes: Iterable[int | None] = self.sizes
        if check.where == "no world":
            sizes = [None]
        elif check.where == "largest world":
            sizes = self.sizes[-1:]
        outcomes = self._allow_known(check, [self._run_in(check, size) for size in sizes])
        self.report.outcomes.extend(outcomes)
        return outcomes

    def _run_in(self, check: ConformanceCheck, size: int | None) -> Outcome:
        begin = time.monotonic()
        outcome = self._examine(check, size)
        return attrs.evolve(outcome, seconds=time.monotonic() - begin)

    def _examine(self, check: ConformanceCheck, size: int | None) -> Outcome:
        world = None if size is None else self._world(size)
        if world is not None and world.trouble and (check.group == "world" or not world.told):
            world.told = True
            return Outcome(check, size, "failed", world.trouble, world.trace)
        if world is not None and (reason := _out_of_reach(check, world)):
            return Outcome(check, size, "skipped", reason)
        subject = self._subject(size, world)
        try:
            if unclaimed := check.unclaimed(subject):
                return Outcome(check, size, "skipped", unclaimed)
            check.run(subject)
            return Outcome(check, size, "passed")
        except Exception as error:  # whatever a plugin does is a finding
            detail, trace = _described(error)
            return Outcome(check, size, "failed", detail, trace)
        finally:
            shutil.rmtree(subject.folder, ignore_errors=True)

    def _allow_known(self, check: ConformanceCheck, outcomes: list[Outcome]) -> list[Outcome]:
        """Failures that a plugin declares are known; a declared one that is none any more is a failure."""
        precision = self.suite.precision or "no"
        for _, plugin in self.plugins:
            for known in plugin.known:
                if known.check != check.name or known.precision not in (None, precision):
                    continue
                if any(outcome.status == "failed" for outcome in outcomes):
                    return [
                        attrs.evolve(one, status="known", detail=known.reason) if one.status == "failed" else one
                        for one in outcomes
                    ]
                text = f"passes, but {plugin.__qualname__}.known declares it as failing ({known.reason}); take it out"
                return [
                    attrs.evolve(one, status="failed", detail=text) if one.status == "passed" else one
                    for one in outcomes
                ]
        return outcomes

    # --------------------------------------------------------------------------------------------- worlds and workers

    def _subject(self, size: int | None, world: _World | None) -> Subject:
        return Subject(
            suite=self.suite,
            size=size or self.sizes[-1],
            pool=self._pool(),
            folder=Path(tempfile.mkdtemp(dir=self._folder.name)),
            plugins=self.plugins,
            pairs={} if world is None else world.pairs,
            everyone=[] if world is None else world.everyone,
            shared=self._shared,
        )

    def _world(self, size: int) -> _World:
        if size not in self._worlds:
            self._worlds[size] = self._look(size)
        return self._worlds[size]

    def _look(self, size: int) -> _World:
        """Bring the world up for the first time, and ask it for what the checks want to know."""
        subject, world = self._subject(size, None), _World()
        try:
            world.pairs = subject.run(pairs, sorted(registry.entries()["precision"]))[0]
            world.refusal = world.pairs.get(self.suite.precision or "no", Pair()).refusal or ""
            if not world.refusal:
                world.everyone = subject.run(look)
        except Exception as error:  # whatever a plugin does is a finding
            world.trouble, world.trace = _described(error)
        return world

    def _pool(self) -> WorkerPool:
        if self._environment is None:
            self._environment = self._wanted_environment()
        # Up to twice the largest world: a checkpoint may be loaded by another number of processes.
        plugins = (self.suite.backend, self.suite.device)
        return self._workers.get(2 * self.sizes[-1], self._environment, plugins)

    def _wanted_environment(self) -> dict[str, str]:
        """What the plugins' hooks want worker processes to start with, as the launcher would ask."""
        from drivetrain.launch.script import ready

        folder = Path(self._folder.name)
        resolved = self.suite.resolved(folder, num_processes=self.sizes[-1])
        try:
            return dict(ready(resolved, "drivetrain", module=True).plan.environment)
        except DrivetrainError:
            return {}  # the checks of the world and of the launcher say what is wrong

    def warm_up(self) -> None:
        """Begin to start the worker processes, which takes seconds, beside checks that need none."""
        self._pool().warm_up(self.sizes[-1])

    def close(self) -> None:
        """End the workers."""
        if self._owns_workers:
            self._workers.close()
        self._folder.cleanup()

    def __enter__(self) -> Conformance:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _out_of_reach(check: ConformanceCheck, world: _World) -> str:
    """Why a check can't run in a world, for reasons that another check reports."""
    if world.trouble:
        return f"the world does not come up: {world.trouble.splitlines()[0]}"
    if world.refusal and check.group != "precision":
        return f"the precision refuses this backend or device: {world.refusal}"
    return ""


def _described(error: Exception) -> tuple[str, str]:
    """What went wrong in one line or a few, and where, if it was no finding of the kit's own."""
    if isinstance(error, Violation):
        return str(error), ""
    if isinstance(error, WorkerError):
        first = error.errors[0]
        if first.type.endswith(".Violation"):
            return f"rank {first.rank}: {first.message}", ""
        return f"rank {first.rank} raised {first.type}: {first.message}", first.traceback
    trace = "" if isinstance(error, TimeoutError) else "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}", trace


def conform(
    suite: Suite | str,
    checks: Iterable[ConformanceCheck] | None = None,
    progress: Callable[[ConformanceCheck, list[Outcome]], Any] | None = None,
    workers: Workers | None = None,
) -> Report:
    """Examine a suite.

    Args:
        suite: What is examined, or the name of an installed plugin.
        checks: Which checks; None: those of the suite's groups.
        progress: Called after each check with what it found.
        workers: As of :class:`Conformance`.

    Returns:
        What was found.

    Raises:
        DrivetrainError: As of :class:`Conformance`.
    """
    with contextlib.closing(Conformance(suite, workers)) as session:
        chosen = session.checks() if checks is None else tuple(checks)
        if any(check.where != "no world" for check in chosen):
            session.warm_up()
        for check in chosen:
            outcomes = session.run(check)
            if progress is not None:
                progress(check, outcomes)
        return session.report
