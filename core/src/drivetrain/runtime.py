"""From a configuration to a run: choose and create the three plugins, touch the device, bring up the world."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain import registry
from drivetrain.binding import Hooks, Origin
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.world import Run, Topology

if TYPE_CHECKING:
    from drivetrain.config import Resolved, RunConfig
    from drivetrain.plugin import Backend, Plugin, Precision
    from drivetrain.registry import Entry

__all__ = ["Runtime", "choose_backend", "choose_device", "start"]

logger = logging.getLogger("drivetrain")

ALONE = "single"
"""The backend of one process when none is named: core's own, which is its defaults."""


@attrs.frozen(eq=False)
class Runtime:
    """A run and what it was made from. One per process."""

    run: Run
    resolved: Resolved
    notes: tuple[str, ...] = ()
    """What was decided on the user's behalf, and why."""

    def close(self, error: BaseException | None = None) -> None:
        """Take the world down. Waits for the other ranks only when there is no error."""
        self.run.hooks.shutdown(run=self.run, error=error)


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
    if processes == 1 and not create(entry, resolved).capabilities.one_process:
        if origin.in_code:
            raise ConfigError(
                f"backend {name!r} was asked for in code, but this is a single process; start several with "
                f"`drivetrain launch --num_processes N`, or name the backend in the configuration instead, where a "
                f"single process runs without it"
            )
        note = f"one process: running without {entry.role} {name!r} ({origin})"
        return registry.find("backend", ALONE), [note]
    return entry, []


def create(entry: Entry, resolved: Resolved) -> Any:
    """The plugin of an entry, with its section of the configuration."""
    cls = registry.load(entry)
    return registry.create(entry, resolved.section(entry.name, cls.Config))


def start(resolved: Resolved, topology: Topology | None = None) -> Runtime:
    """Bring up the run a configuration describes, in the world the launcher decided.

    Raises:
        DrivetrainError: A plugin is missing, broken, or can't work with the others. Nothing is left running then.
    """
    from drivetrain import defaults  # brings torch, which the launcher, choosing plugins as we do, can do without

    topology = _assign_device(Topology.from_environment() if topology is None else topology, resolved.run)
    hooks = Hooks(defaults)

    backend_entry, backend_notes = choose_backend(resolved, topology.size)
    backend: Backend = _register(hooks, backend_entry, create(backend_entry, resolved))
    if topology.size > 1 and not backend.capabilities.many_processes:
        raise DrivetrainError(
            f"this run has {topology.size} processes, but backend {backend_entry.name!r} "
            f"({resolved.origin('backend')}) works with one. Name one for several processes, or none; "
            f"`drivetrain plugins` lists those installed"
        )
    device_entry, device_notes = choose_device(resolved)
    registry.check_engines(backend_entry, device_entry)
    _register(hooks, device_entry, create(device_entry, resolved))
    device = hooks.device(topology=topology)

    precision_entry, precision_notes = registry.resolve_precision(
        resolved.run.mixed_precision,
        device.type,
        backend.capabilities,
        where=resolved.origin("mixed_precision").where,
        configure=lambda entry, cls: resolved.section(entry.name, cls.Config),
    )
    precision: Precision = _register(hooks, precision_entry, create(precision_entry, resolved))
    _check_pair(backend_entry, backend, precision_entry, precision, device.type)

    collectives = None
    if topology.size > 1 or backend.capabilities.process_group:
        collectives = hooks.collectives(device_type=device.type)
    world = hooks.init_world(config=resolved.run, topology=topology, device=device, collectives=collectives)
    run = Run(
        config=resolved.run,
        topology=topology,
        world=world,
        policy=precision.policy,
        capabilities=backend.capabilities,  # asked again: it may depend on the device
        names={"backend": backend_entry.name, "device": device_entry.name, "precision": precision_entry.name},
        hooks=hooks,
    )
    runtime = Runtime(run, resolved, (*backend_notes, *device_notes, *precision_notes))
    _announce(runtime)
    return runtime


def _assign_device(topology: Topology, config: RunConfig) -> Topology:
    """Give each process of this machine its entry of ``gpu_ids``."""
    if isinstance(config.gpu_ids, str):
        return topology
    if topology.local_size > len(config.gpu_ids):
        raise ConfigError(
            f"gpu_ids names {len(config.gpu_ids)} device(s) for {topology.local_size} processes on this machine; "
            f"name one for each process (the same one several times, if they are to share it)"
        )
    return attrs.evolve(topology, device_index=config.gpu_ids[topology.local_rank])


def _register(hooks: Hooks, entry: Entry, plugin: Plugin) -> Any:
    hooks.register(plugin, Origin(entry.role, entry.name, entry.distribution, entry.version))
    return plugin


def _check_pair(
    backend_entry: Entry, backend: Backend, precision_entry: Entry, precision: Precision, device_type: str
) -> None:
    """Refuse a precision that can't work with this backend or device, before anything is allocated."""
    reason = registry.refusal(precision, backend.capabilities, device_type)
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
    overridden = runtime.resolved.describe()
    logger.info(
        "backend=%s device=%s (%s) mixed_precision=%s processes=%d%s",
        run.names["backend"],
        run.names["device"],
        run.world.device,
        run.names["precision"],
        run.world.size,
        f"; {overridden}" if overridden else "",
    )
