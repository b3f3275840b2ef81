"""Group *world*: the run comes up, and is what it says."""

from __future__ import annotations

from typing import Any

from drivetrain.errors import CollectiveError, DrivetrainError
from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.subject import Facts, Pair, Subject, class_of
from drivetrain.testing.pool import WorkerError

__all__ = ["checks", "look", "pairs", "refusal"]

checks = CheckList("world")


def look() -> Facts:
    """Bring up the run of the configuration, and say what it is."""
    from drivetrain import hookspecs, state

    run = state.ensure().run
    owners = {}
    for name, info in hookspecs.hooks().items():
        found = run.hooks.owners(name) if info.all_called else [run.hooks.owner(name)]
        roles = [origin.role for origin in found if origin is not None]
        if roles:
            owners[name] = ", ".join(roles)
    return Facts(
        capabilities=run.capabilities,
        policy=run.policy,
        names=dict(run.names),
        device=run.world.device.type,
        rank=run.world.rank,
        size=run.world.size,
        data_size=run.world.data_size,
        feeds=run.world.feeds,
        owners=owners,
    )


def pairs(precisions: list[str]) -> dict[str, Pair]:
    """Whether each precision works with the configured backend and device. Brings up nothing but the device."""
    from drivetrain import defaults, registry
    from drivetrain.binding import Hooks, Origin
    from drivetrain.config import resolve
    from drivetrain.errors import PluginError
    from drivetrain.runtime import choose_backend, choose_device, create
    from drivetrain.world import Topology

    resolved, topology, hooks = resolve(), Topology.from_environment(), Hooks(defaults)
    chosen = (choose_backend(resolved, topology.size)[0], choose_device(resolved)[0])
    backend, device = (create(entry, resolved) for entry in chosen)
    for entry, plugin in zip(chosen, (backend, device), strict=True):
        hooks.register(plugin, Origin(entry.role, entry.name, entry.distribution, entry.version))
    on: Any = hooks.device(topology=topology)
    dtypes: Any = hooks.compute_dtypes(device=on)
    found = {}
    for name in precisions:
        try:
            precision = create(registry.find("precision", name), resolved)
            reason = registry.refusal(precision, backend.capabilities, on.type, dtypes)
        except PluginError as error:
            found[name] = Pair(broken=str(error))
        else:
            found[name] = Pair(reason or backend.refuses(precision.policy, on.type))
    return found


def refusal(subject: Subject, size: int) -> str | None:
    """Why the plugins can't be had with that many processes, by their own word; None: the world comes up.

    Settings may rule a size out, and a machine may have no more devices. A rank that is lost is no refusal.
    """
    found: dict[int, str | None] = subject.shared.setdefault("refusals by size", {})
    if size not in found:
        try:
            subject.run(look, size=size)
            found[size] = None
        except WorkerError as error:
            kind = class_of(error.errors[0])
            if not issubclass(kind, DrivetrainError) or issubclass(kind, CollectiveError):
                raise
            found[size] = error.errors[0].message
    return found[size]


@checks("the run comes up with the plugins that were asked for")
def comes_up(subject: Subject) -> None:
    for facts in subject.everyone:
        for role, name in subject.suite.named().items():
            expect(facts.names[role], name, f"the {role} of the run")


@checks("ranks, sizes and data shards fit together")
def sizes(subject: Subject) -> None:
    expect([facts.rank for facts in subject.everyone], list(range(subject.size)), "ranks of the processes")
    expect({facts.size for facts in subject.everyone}, {subject.size}, "size of the world")
    shards = {(facts.data_size, facts.feeds) for facts in subject.everyone}
    if len(shards) != 1:
        raise Violation(f"processes disagree on (data_size, feeds): {sorted(shards)}")
    data_size, feeds = shards.pop()
    if feeds < 1 or data_size < feeds or data_size > feeds * subject.size:
        raise Violation(f"{data_size} data shards can't be fed by {subject.size} process(es) that feed {feeds} each")


@checks("several shards have a distributed type, and it is a name in capitals")
def distributed_type(subject: Subject) -> None:
    kind = subject.facts.capabilities.distributed_type
    if kind != kind.upper() or not kind.replace("_", "").isalnum():
        raise Violation(f"capabilities.distributed_type must be a name in capitals, not {kind!r}")
    if subject.facts.data_size > 1 and kind == "NO":
        raise Violation(f"capabilities.distributed_type is 'NO', but there are {subject.facts.data_size} data shards")
