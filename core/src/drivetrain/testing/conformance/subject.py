"""What is examined: the plugins of a suite, and a world of processes that runs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain import registry
from drivetrain.config import Resolved, resolve
from drivetrain.errors import ConfigError, PluginNotFoundError
from drivetrain.plugin import Capabilities, Plugin, Policy
from drivetrain.registry import Entry
from drivetrain.testing.conformance.checks import Violation
from drivetrain.testing.pool import RemoteError, WorkerError, WorkerPool

if TYPE_CHECKING:
    import torch

__all__ = ["Facts", "Pair", "Subject", "Suite", "class_of"]

_KEYS = {"backend": "backend", "device": "device", "precision": "mixed_precision"}
_TASK_TIMEOUT = 60.0
_COLLECTIVE_TIMEOUT = 20
"""Seconds. What a rank does for the first time, such as importing an engine, must not make the others give up."""
_LOOSEST = 0.35
"""Even an 8-bit format must follow fp32 that closely over a few updates."""
_GENTLE_SCALE = 256.0
"""First loss scale of all checks: gradients of about 1 must not overflow unless a check wants them to."""


@attrs.frozen(kw_only=True)
class Suite:
    """Which plugins are examined together, and how.

    Args:
        backend: Name of an installed backend; None: what the core takes by itself.
        device: Name of an installed device; None: ``auto``.
        precision: Name of an installed precision; None: full precision.
        sizes: Numbers of processes of the worlds to run in; None: two for a backend that distributes, else one, and
            both for one that can do both.
        settings: More of the YAML, such as the section of a plugin.
        groups: Run only these groups of checks; None: all.
        tolerance: Largest deviation of what training changed, as a part of it; None: by the dtype computed in.
    """

    backend: str | None = None
    device: str | None = None
    precision: str | None = None
    sizes: tuple[int, ...] | None = None
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    groups: tuple[str, ...] | None = None
    tolerance: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.backend is self.device is self.precision is None:
            raise ConfigError("a suite needs the name of at least one plugin: a backend, a device or a precision")

    @classmethod
    def of(cls, plugin: str | Suite) -> Suite:
        """The suite of a plugin that is given by its name alone, whatever its role; a suite stays as it is.

        Raises:
            PluginNotFoundError: No installed plugin has that name.
        """
        if isinstance(plugin, Suite):
            return plugin
        roles = [role for role in _KEYS if plugin in registry.entries()[role]]
        if len(roles) > 1:
            raise ConfigError(f"{plugin!r} is the name of a {' and a '.join(roles)}; say which: Suite({roles[0]}=...)")
        if not roles:
            registry.find("backend", plugin)  # says what is installed
            raise PluginNotFoundError(f"no installed plugin is called {plugin!r}")
        names: dict[str, Any] = {roles[0]: plugin}
        return cls(**names)

    def named(self) -> dict[str, str]:
        """The plugins under examination: their names by role."""
        given = {role: getattr(self, role) for role in _KEYS}
        return {role: name for role, name in given.items() if name is not None}

    def entries(self) -> list[Entry]:
        """Their entry points.

        Raises:
            PluginNotFoundError: One is not installed.
        """
        return [registry.find(role, name) for role, name in self.named().items()]

    def config(self) -> dict[str, Any]:
        """The YAML of its runs."""
        chosen = {_KEYS[role]: name for role, name in self.named().items()}
        sections = gentle_scale(self.precision)
        for key, value in self.settings.items():
            sections[key] = {**sections[key], **value} if key in sections and value else value
        return {"device": "auto", "collective_timeout": _COLLECTIVE_TIMEOUT, **chosen, **sections}

    def resolved(self, folder: Path, **settings: Any) -> Resolved:
        """The configuration as the core resolves it.

        Args:
            folder: For the file it is read from.
            settings: More settings, of the core.
        """
        path = folder / "suite.yaml"
        path.write_text(json.dumps({**self.config(), **settings}))  # JSON is YAML
        return resolve(path, command_line={}, environment={})

    def __str__(self) -> str:
        return ", ".join(f"{_KEYS[role]} {name}" for role, name in self.named().items())


def gentle_scale(precision: str | None) -> dict[str, dict[str, Any]]:
    """The section that lowers the first loss scale of a precision, if it has such a setting."""
    if precision is None:
        return {}
    config = registry.load(registry.find("precision", precision)).Config
    if attrs.has(config) and "init_scale" in attrs.fields_dict(config):
        return {precision: {"init_scale": _GENTLE_SCALE}}
    return {}


@attrs.frozen
class Pair:
    """Whether a precision works with the suite's backend and device."""

    refusal: str | None = None
    """Why it does not, by its own word or the core's."""
    broken: str | None = None
    """Why that can't be asked."""


@attrs.frozen(kw_only=True)
class Facts:
    """What a run of the suite says of itself, on one rank."""

    capabilities: Capabilities
    policy: Policy
    names: Mapping[str, str]
    device: str
    """Torch device type."""
    rank: int
    size: int
    data_size: int
    feeds: int
    owners: Mapping[str, str]
    """Role of the plugin that answers a hook; hooks left to the core are not in it."""


@attrs.define(kw_only=True, eq=False)
class Subject:
    """The plugins of a suite in a world of one size. What a check is given."""

    suite: Suite
    size: int
    """Processes."""
    pool: WorkerPool
    folder: Path
    """Empty at first, and the check's own."""
    plugins: list[tuple[Entry, type[Plugin]]]
    """Those that are examined."""
    pairs: Mapping[str, Pair] = attrs.field(factory=dict)
    """By name of every installed precision; empty for checks that need no world."""
    everyone: Sequence[Facts] = ()
    """What the run says of itself on each rank; empty for checks that need no world."""
    shared: dict[str, Any] = attrs.field(factory=dict)
    """What one check leaves for another, to save time; it may not be there."""

    @property
    def facts(self) -> Facts:
        """What the run says of itself on rank 0."""
        return self.everyone[0]

    def run(
        self,
        task: Callable[..., Any],
        *args: Any,
        size: int | None = None,
        config: Mapping[str, Any] | None = None,
        timeout: float = _TASK_TIMEOUT,
    ) -> list[Any]:
        """Run a task on every rank; see ``WorkerPool.run``.

        Args:
            task: A function at the top level of a module.
            *args: Its arguments.
            size: Processes, if others than the world's.
            config: Settings on top of the suite's.
            timeout: Seconds until all ranks must be done.
        """
        settings = {**self.suite.config(), **(config or {})}
        return self.pool.run(task, *args, size=size or self.size, config=settings, timeout=timeout)

    def refuse(self, task: Callable[..., Any], *args: Any, what: str, error: str = "DrivetrainError") -> list[str]:
        """Expect a task to be refused on every rank, by an error of the library's own.

        Args:
            task: As for ``run``.
            *args: Its arguments.
            what: What is tried, for the message.
            error: Its class, by name, or a subclass that is named so at its end.

        Returns:
            The messages, in rank order.

        Raises:
            Violation: It was not, or not on all ranks, or with another error.
        """
        from drivetrain import errors

        wanted = getattr(errors, error)
        try:
            self.run(task, *args)
        except WorkerError as raised:
            if len(raised.errors) == self.size and all(issubclass(class_of(one), wanted) for one in raised.errors):
                return [raised.of(rank).message for rank in range(self.size)]
            raise Violation(
                f"{what} should be refused with a {error} on all {self.size} rank(s), but "
                f"{len(raised.errors)} raised: {raised.errors[0]}"
            ) from raised
        raise Violation(f"{what} should be refused with a {error}, but went through")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What the precision computes in; None: in the dtype of the model."""
        return self.facts.policy.compute_dtype

    @property
    def tolerance(self) -> float:
        """Largest relative deviation that is right."""
        if self.suite.tolerance is not None:
            return self.suite.tolerance
        narrowest = self.facts.policy.converted_dtype or self.compute_dtype
        if narrowest is None:
            return 1e-4
        import torch

        return min(max(1e-4, 12 * torch.finfo(narrowest).eps), _LOOSEST)


def class_of(failure: RemoteError) -> type[BaseException]:
    """Which of the library's errors a rank raised; ``Exception`` for any other."""
    from drivetrain import errors

    found: type[BaseException] = getattr(errors, failure.type.rpartition(".")[2], Exception)
    return found
