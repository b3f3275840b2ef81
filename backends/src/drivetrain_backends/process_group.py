"""How a run gets its process group, and how it is given back."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from drivetrain.errors import ConfigError, DrivetrainError, StateConflictError
from drivetrain.world import Run, Topology, World
from drivetrain_backends import collectives

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

__all__ = ["enter", "leave"]

_stores: dict[tuple[object, ...], dist.Store] = {}
"""The store of this process's last world, by where it is."""


def enter(config: RunConfig, topology: Topology, device: torch.device, library: str | None) -> tuple[World, bool]:
    """Bring up communication for this process.

    A process group that the user initialised before is kept, with its own timeout and library.

    Args:
        config: The resolved configuration.
        topology: What the launcher decided.
        device: The device this process works on.
        library: The device's communication library, as ``init_process_group`` takes it; None if no group is needed.

    Returns:
        The world, and whether the process group was made here (and so must be destroyed by :func:`leave`).

    Raises:
        ConfigError: It is not known where the processes meet.
        DrivetrainError: They did not meet in time.
        StateConflictError: The user's process group contradicts the launcher.
    """
    if dist.is_initialized():
        return _adopt(topology, device), False
    if library is not None:
        library = config.collectives or library
        _initialize(library, config, topology, device)
    world = World(
        rank=topology.rank,
        size=topology.size,
        device=device,
        local_rank=topology.local_rank,
        local_size=topology.local_size,
        collectives=library,
    )
    return world, library is not None


def _adopt(topology: Topology, device: torch.device) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    if topology.launcher is not None and (rank, size) != (topology.rank, topology.size):
        raise StateConflictError(
            f"the process group this program initialised says rank {rank} of {size}, the environment of "
            f"{topology.launcher} says rank {topology.rank} of {topology.size}. Leave init_process_group to "
            f"Drivetrain, or give it the launcher's rank and size"
        )
    launched = topology.launcher is not None
    return World(
        rank=rank,
        size=size,
        device=device,
        # Without a launcher nobody says what runs on which machine: taken to be one.
        local_rank=topology.local_rank if launched else rank,
        local_size=topology.local_size if launched else size,
        collectives=dist.get_backend(),
    )


def _initialize(library: str, config: RunConfig, topology: Topology, device: torch.device) -> None:
    options: dict[str, Any] = {"backend": library, "rank": topology.rank, "world_size": topology.size}
    if config.collective_timeout is not None:
        options["timeout"] = timedelta(seconds=config.collective_timeout)
    if device.index is not None and _serves(library, device.type):
        # Connects at once and on the right device; without it the first collective would guess the device.
        options["device_id"] = device
    alone = topology.size == 1 and config.init_method is None
    where = "this process" if alone else _meeting_point(config, topology)
    undo = contextlib.ExitStack()
    try:
        options["store"] = dist.HashStore() if alone else _meet(where, topology, options.get("timeout"), undo)
        dist.init_process_group(**options)
    except (RuntimeError, ValueError) as error:
        undo.close()
        # torch numbers groups, and has counted this one: a second try would look for the others under another number.
        dist.distributed_c10d._world.group_count = 0
        if where == "env://":
            where = f"{topology.master_address}:{topology.master_port} (MASTER_ADDR, MASTER_PORT)"
        raise DrivetrainError(
            f"rank {topology.rank} could not form a {library} process group of {topology.size} at {where}: "
            f"{collectives.first_line(error)}. Check that all of them were started, that rank 0's machine can be "
            f"reached at this address and that no other job uses the port"
        ) from error


def _meet(where: str, topology: Topology, timeout: timedelta | None, undo: contextlib.ExitStack) -> dist.Store:
    """The store at which the processes of this world find each other.

    It is kept for the worlds that follow in this process, after ``end_training``. Where rank 0 is the one that serves
    it, looking for it anew would be a race: a rank that is a little faster would still find the old one, and be cut off
    when rank 0 gives it up. A store, kept here or by a launcher, remembers the addresses that the ranks of a past group
    had, and waits for ever at those. So each rank counts its worlds in it, and every world has a part to itself.

    Args:
        where: As ``init_process_group`` takes it.
        topology: What the launcher decided.
        timeout: Longest wait for the others; None: torch's own.
        undo: Given what takes the count back, for a second try after a failure.
    """
    limit = default_pg_timeout if timeout is None else timeout
    address = (topology.master_address, topology.master_port) if where == "env://" else ()
    place = (os.getpid(), where, *address, topology.rank, topology.size)
    if place in _stores:
        _stores[place].set_timeout(limit)
    else:
        store, _, _ = next(dist.rendezvous(where, topology.rank, topology.size, timeout=limit))
        _stores.clear()
        _stores[place] = store
    store = _stores[place]
    key = f"drivetrain/{topology.rank}"

    def forget() -> None:
        # Not kept after a failure: whoever serves it may be gone, and what this try left in it misleads the next.
        _stores.clear()
        with contextlib.suppress(RuntimeError):
            store.add(key, -1)

    undo.callback(forget)
    number = store.add(key, 1)
    return dist.PrefixStore(f"drivetrain/world {number}", store)


def _serves(library: str, device_type: str) -> bool:
    """Whether a communication library, plain or ``cpu:one,other:two``, moves tensors of that device type."""
    if ":" in library:
        return any(part.partition(":")[0] == device_type for part in library.split(","))
    return device_type != "cpu" and device_type in dist.Backend.backend_capability.get(library.lower(), [])


def _meeting_point(config: RunConfig, topology: Topology) -> str:
    if config.init_method is not None:
        return config.init_method
    if topology.master_address and topology.master_port:
        return "env://"
    if config.main_process_ip and config.main_process_port:
        host = f"[{config.main_process_ip}]" if ":" in config.main_process_ip else config.main_process_ip
        return f"tcp://{host}:{config.main_process_port}"
    raise ConfigError(
        f"{topology.launcher} started {topology.size} processes but nothing says where they meet. Set main_process_ip "
        f"and main_process_port in the YAML, or MASTER_ADDR and MASTER_PORT in the environment of every process, to an "
        f"address of rank 0's machine and a free port there"
    )


def leave(run: Run, error: BaseException | None) -> None:
    """Destroy the process group. Waits for the other ranks first (at most the collective timeout) if all went well.

    Args:
        run: The run that ends.
        error: What ended it. Other ranks may be waiting in a collective then, so nothing is waited for.
    """
    if not dist.is_initialized():
        return  # the user's own code destroyed it
    try:
        if error is None and run.world.size > 1:
            collectives.barrier(run, None)
    except BaseException:
        _destroy(run, orderly=False)
        raise
    _destroy(run, orderly=error is None)


def _destroy(run: Run, orderly: bool) -> None:
    let_threads_rest()
    if orderly or run.world.device.type == "cpu":
        dist.destroy_process_group()
    else:
        # An accelerator's library finishes queued work when destroyed, which a lost peer would make wait for ever.
        dist.distributed_c10d._abort_process_group()


def let_threads_rest(at_most: float = 1.0) -> None:
    """Wait until no other thread of this process is at work, usually about a millisecond.

    A communication library's thread wakes whoever waits for a collective before it lets go of the tensors. If Python
    has begun to end by then, the thread needs the interpreter's lock to free them, gets ended instead, and takes the
    process down with SIGABRT ("terminate called without an active exception"). On a busy machine that does happen.

    Args:
        at_most: Seconds; threads of the user's own may never rest.
    """
    if sys.platform != "linux":
        time.sleep(0.02)
        return
    end = time.monotonic() + at_most
    looks = 0
    while looks < 2 and time.monotonic() < end:  # twice: it may have been waiting for the lock that this loop holds
        time.sleep(0.0005)
        looks = looks + 1 if _others_rest() else 0


def _others_rest() -> bool:
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == threading.get_native_id():
            continue
        try:
            state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue  # it has ended
        if state not in (b"S", b"Z", b"X"):  # sleeping, or gone
            return False
    return True
