"""From a configuration to a run: choose and create the three plugins, touch the device, bring up the world."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain import registry
from drivetrain.binding import Hooks, Origin
from drivetrain.config.schema import world_keys
from drivetrain.discovery import CORE
from drivetrain.errors import ConfigError, DrivetrainError, PluginError
from drivetrain.launch.environment import RESOLVED
from drivetrain.plugin import Capabilities, Policy
from drivetrain.world import Run, Topology, World

if TYPE_CHECKING:
    from drivetrain.config import Resolved, RunConfig
    from drivetrain.plugin import Backend, Plugin, Precision
    from drivetrain.registry import Entry

__all__ = ["Runtime", "check_device_numbers", "choose_backend", "choose_device", "precision_name", "start"]

logger = logging.getLogger("drivetrain")

ALONE = f"{CORE}:single"
"""The backend of one process when none is named: core's own, which is its defaults. In full: it stays core's own where
another distribution offers one by the same name."""


@attrs.frozen(eq=False)
class Runtime:
    """A run and what it was made from. One per process."""

    run: Run
    resolved: Resolved
    notes: tuple[str, ...] = ()
    """What was decided on the user's behalf, and why."""
    former: Runtime | None = None
    """The run whose world this one goes on in, with other settings."""

    def close(self, error: BaseException | None = None) -> None:
        """Take the world down. Waits for the other ranks only when there is no error."""
        try:
            self.run.hooks.shutdown(run=self.run, error=error)
        finally:
            if self.former is not None:
                self.former.close(error)


def choose_device(resolved: Resolved) -> tuple[Entry, list[str]]:
    """The device plugin a configuration asks for, and what was noticed while choosing it."""
    name = resolved.run.device
    if name == "auto":
        return registry.choose_device()
    return registry.find("device", name, where=resolved.origin("device").where), []


def choose_backend(resolved: Resolved, processes: int) -> tuple[Entry, list[str]]:
    """The backend a configuration asks for with that many processes, and what was noticed while choosing it.

    Raises:
        ConfigError: It was asked for in code, but can't work with one process.
    """
    name = resolved.run.backend
    if name is None:
        if processes == 1:
            return registry.find("backend", ALONE), []
        return registry.choose_default_backend(), []
    origin = resolved.origin("backend")
    entry = registry.find("backend", name, where=origin.where)
    if processes == 1 and not capabilities(entry, create(entry, resolved)).one_process:
        if origin.in_code:
            raise ConfigError(
                f"backend {name!r} was asked for in code, but this is a single process; start several with "
                f"`drivetrain launch --num_processes N`, or name the backend in the configuration instead, where a "
                f"single process runs without it"
            )
        note = f"one process: running without {entry.role} {name!r} ({origin})"
        return registry.find("backend", ALONE), [note]
    return entry, []


def capabilities(entry: Entry, backend: Backend) -> Capabilities:
    """What a backend says that it can do.

    Raises:
        PluginError: It could not say.
    """
    return registry.stated(entry, backend, "capabilities", Capabilities)


def precision_name(resolved: Resolved) -> str:
    """The precision a configuration asks for, as the registry knows it: core's own where nobody named one."""
    name = resolved.run.mixed_precision
    return f"{CORE}:{name}" if resolved.origin("mixed_precision").source == "default" else name


def create(entry: Entry, resolved: Resolved) -> Any:
    """The plugin of an entry, with its section of the configuration."""
    return registry.create(entry, _section(entry, registry.load(entry), resolved))


def _section(entry: Entry, cls: type[Plugin], resolved: Resolved) -> Any:
    try:
        return resolved.section(entry.name, cls.Config)
    except PluginError as error:  # the class is at fault, not what was written
        raise registry.at_fault(entry, str(error)) from error


def start(resolved: Resolved, topology: Topology | None = None, former: Runtime | None = None) -> Runtime:
    """Bring up the run a configuration describes, in the world the launcher decided.

    Args:
        resolved: The configuration.
        topology: What the launcher decided; None: it is read from the environment.
        former: A run of this process that this one takes the place of. Its world stays up, for backends to go on in as
            they do in one that the user made, and is taken down with this one.

    Raises:
        DrivetrainError: A plugin is missing, broken, or can't work with the others. Nothing is left running then.
    """
    import torch  # not above: the launcher chooses plugins as we do, and can do without

    from drivetrain import defaults

    topology = Topology.from_environment() if topology is None else topology
    hooks = Hooks(defaults)

    backend_entry, backend_notes = choose_backend(resolved, topology.size)
    backend: Backend = _register(hooks, backend_entry, create(backend_entry, resolved))
    claims = capabilities(backend_entry, backend)
    if topology.size > 1 and not claims.many_processes:
        raise DrivetrainError(
            f"this run has {topology.size} processes, but backend {backend_entry.name!r} "
            f"({resolved.origin('backend')}) works with one. Name one for several processes, or none; "
            f"`drivetrain plugins` lists those installed"
        )
    device_entry, device_notes = choose_device(resolved)
    registry.check_engines(backend_entry, device_entry)
    _register(hooks, device_entry, create(device_entry, resolved))
    topology = _assign_device(topology, resolved.run, registry.load(device_entry).label)
    device: torch.device = _expect(hooks, "device", hooks.device(topology=topology), torch.device)
    dtypes = hooks.compute_dtypes(device=device)

    precision_entry, precision_notes = registry.resolve_precision(
        precision_name(resolved),
        device.type,
        claims,
        where=resolved.origin("mixed_precision").where,
        configure=lambda entry, cls: _section(entry, cls, resolved),
        configured=resolved.sections(),
        dtypes=dtypes,
    )
    precision: Precision = _register(hooks, precision_entry, create(precision_entry, resolved))
    policy = registry.stated(precision_entry, precision, "policy", Policy)
    _check_pair(backend_entry, backend, claims, precision_entry, precision, device.type, dtypes)

    collectives = None
    if topology.size > 1 or claims.process_group:
        collectives = resolved.run.collectives or hooks.collectives(device_type=device.type)
    world = hooks.init_world(config=resolved.run, topology=topology, device=device, collectives=collectives)
    _expect(hooks, "init_world", world, World)
    run = Run(
        config=resolved.run,
        topology=topology,
        world=world,
        policy=policy,
        capabilities=capabilities(backend_entry, backend),  # asked again: it may depend on the device
        names={"backend": backend_entry.name, "device": device_entry.name, "precision": precision_entry.name},
        hooks=hooks,
    )
    runtime = Runtime(run, resolved, (*backend_notes, *device_notes, *precision_notes), former)
    _announce(runtime)
    return runtime


def check_device_numbers(config: RunConfig, processes: int, label: str) -> None:
    """Check that ``gpu_ids`` has an entry for each process of this machine.

    Args:
        config: The settings.
        processes: On this machine.
        label: What one of the devices is called.

    Raises:
        ConfigError: It has fewer.
    """
    if isinstance(config.gpu_ids, list) and processes > len(config.gpu_ids):
        raise ConfigError(
            f"gpu_ids names {len(config.gpu_ids)} {label}(s) for {processes} processes on this machine; "
            f"name one for each process (the same one several times, if they are to share it)"
        )


def _assign_device(topology: Topology, config: RunConfig, label: str = "device") -> Topology:
    """Give each process of this machine its entry of ``gpu_ids``; ``label`` is what one of them is called."""
    check_device_numbers(config, topology.local_size, label)
    if isinstance(config.gpu_ids, str):
        return topology
    return attrs.evolve(topology, device_index=config.gpu_ids[topology.local_rank])


def _register(hooks: Hooks, entry: Entry, plugin: Plugin) -> Any:
    hooks.register(plugin, Origin(entry.role, entry.name, entry.distribution, entry.version))
    return plugin


def _expect(hooks: Hooks, name: str, answer: Any, kind: type) -> Any:
    """The answer of a hook, if it is what everything after it will take it for."""
    if not isinstance(answer, kind):
        raise PluginError(
            f"hook {name!r} of {hooks.owner(name)} must return a {kind.__name__}, but returned {answer!r}"
        )
    return answer


def _check_pair(
    backend_entry: Entry,
    backend: Backend,
    claims: Capabilities,
    precision_entry: Entry,
    precision: Precision,
    device_type: str,
    dtypes: Any,
) -> None:
    """Refuse a precision that can't work with this backend or device, before anything is allocated."""
    try:
        reason = registry.refusal(precision, claims, device_type, dtypes)
    except PluginError as error:
        raise registry.at_fault(precision_entry, str(error)) from error.__cause__
    try:
        reason = reason or backend.refuses(precision.policy, device_type)
    except Exception as error:
        raise registry.at_fault(backend_entry, f"its refuses raised {type(error).__name__}: {error}") from error
    if reason:
        raise DrivetrainError(
            f"mixed_precision {precision_entry.name!r} can't be combined with backend {backend_entry.name!r} on "
            f"{device_type}: {reason}"
        )


def _announce(runtime: Runtime) -> None:
    """Say once, on the main process, what was resolved and where each overridden value came from."""
    run = runtime.run
    if run.world.rank != 0:
        return
    for note in runtime.notes:
        logger.warning("%s", note)
    # Another launcher's world is its own, whatever settings say of one.
    foreign = run.topology.launcher is not None and RESOLVED not in os.environ
    overridden = runtime.resolved.describe(leave_out=world_keys() if foreign else ())
    logger.info(
        "backend=%s device=%s (%s) mixed_precision=%s processes=%d%s",
        run.names["backend"],
        run.names["device"],
        run.world.device,
        run.names["precision"],
        run.world.size,
        f"; {overridden}" if overridden else "",
    )
