"""Every contender lives in processes of its own that wait for their turn, so that turns can be interleaved.

Within each of those processes the hand-written reference takes turns with the contender: what one process happens to
have (the layout of its memory, the core it runs on) is the same for both, and cancels out of their difference.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from measuring import Times, version

__all__ = ["DISTRIBUTIONS", "Measured", "Turn", "World", "installed", "measure"]

DISTRIBUTIONS = {"torch": "torch", "drivetrain": "drivetrain", "accelerate": "accelerate", "fabric": "lightning-fabric"}
"""Contenders, and which distribution each needs."""

_WORKER = Path(__file__).parent / "worker.py"
_TURN_TIMEOUT = 300.0


@attrs.frozen
class Turn:
    """What one turn took: the hand-written reference, and the contender right before or after it."""

    reference: Times
    contender: Times

    def added(self, clock: str) -> float:
        """Seconds the contender took longer, on the clock ``"wall"``, ``"cpu"`` or ``"thread"``."""
        return float(getattr(self.contender, clock) - getattr(self.reference, clock))

    def relative(self, clock: str) -> float:
        """How many times as long as the reference the contender took."""
        return float(getattr(self.contender, clock) / getattr(self.reference, clock))


@attrs.frozen
class Measured:
    """What was measured of one contender."""

    turns: Sequence[Turn]
    """In the order of the blocks."""
    added_calls: int
    """Function calls in one turn beyond the reference's."""


class World:
    """The processes of one contender in one case.

    Args:
        activity: ``module:function`` that builds what is timed, see ``worker.py``.
        contender: One of ``DISTRIBUTIONS``.
        options: For the activity; plain values.
        ranks: Number of processes.
    """

    def __init__(self, activity: str, contender: str, options: Mapping[str, Any], ranks: int) -> None:
        self.contender = contender
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - open as long as the processes are
        command = [sys.executable, str(_WORKER), activity, contender, json.dumps(dict(options))]
        port = _free_port()
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, **_environment(rank, ranks, port)},
            )
            for rank in range(ranks)
        ]

    def ready(self) -> None:
        """Wait until all processes have built what they will time."""
        for process in self._processes:
            self._read(process)

    def turn(self) -> Turn:
        """Let the world run once; the times are rank 0's."""
        answer = self._ask("go")
        return Turn(Times(**answer["reference"]), Times(**answer["contender"]))

    def added_calls(self) -> int:
        """Function calls the contender makes beyond the reference's, on rank 0."""
        answer = self._ask("count")
        return int(answer["contender"] - answer["reference"])

    def _ask(self, question: str) -> dict[str, Any]:
        """Ask all processes; returns rank 0's answer when all have answered."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{question}\n")
            process.stdin.flush()
        first, *_ = [self._read(process) for process in self._processes]
        return first

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # a worker ends with its input
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _TURN_TIMEOUT)
        line = process.stdout.readline() if ready else ""
        if not line:
            self._errors.seek(0)
            tail = "".join(self._errors.readlines()[-25:])
            state = "ended" if ready else f"said nothing for {_TURN_TIMEOUT:.0f} s"
            raise RuntimeError(f"a process of {self.contender!r} {state}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What ``torch.distributed.run`` would set, which all contenders understand; alone, a process is not launched."""
    common = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if ranks == 1:
        return common
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "benchmark"}
    return {**common, **{name: str(value) for name, value in {**own, **meeting}.items()}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed(contenders: Sequence[str]) -> list[str]:
    """Those whose distribution is there; says which are not."""
    missing = [name for name in contenders if version(DISTRIBUTIONS[name]) is None]
    for name in missing:
        print(f"{name}: {DISTRIBUTIONS[name]} is not installed; left out (pip install '.[bench]')", file=sys.stderr)
    return [name for name in contenders if name not in missing]


@contextlib.contextmanager
def _worlds(activity: str, contenders: Sequence[str], options: Mapping[str, Any], ranks: int) -> Iterator[list[World]]:
    worlds: list[World] = []
    try:
        for contender in contenders:
            worlds.append(World(activity, contender, options, ranks))
            worlds[-1].ready()  # one after the other: starting up is work too
        yield worlds
    finally:
        for world in worlds:
            world.close()


def measure(
    activity: str,
    contenders: Sequence[str],
    options: Mapping[str, Any],
    *,
    ranks: int,
    blocks: int,
    launches: int = 1,
    warm_up: int = 2,
) -> dict[str, Measured]:
    """Give every contender one turn a block, and count calls at the end.

    Args:
        activity: As for :class:`World`.
        contenders: Those to be measured.
        options: As for :class:`World`.
        ranks: Processes of each.
        blocks: Turns of each, warm-up not included.
        launches: Start all processes anew that many times, and take a part of the blocks each time.
        warm_up: Turns after each start that do not count.
    """
    turns: dict[str, list[Turn]] = {contender: [] for contender in contenders}
    calls: dict[str, int] = {}
    for launch in range(launches):
        share = len(range(launch, blocks, launches))
        with _worlds(activity, contenders, options, ranks) as worlds:
            for block in range(-warm_up, share):
                for world in worlds if block % 2 else reversed(worlds):
                    turn = world.turn()
                    if block >= 0:
                        turns[world.contender].append(turn)
            if launch == launches - 1:
                calls = {world.contender: world.added_calls() for world in worlds}
    return {contender: Measured(turns[contender], calls[contender]) for contender in contenders}
