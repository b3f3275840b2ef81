"""Logging that knows its rank: this library's own lines, and loggers for user code.

Nothing here touches the root logger, and nothing here needs a running world: before one exists the rank is read from
the launcher's environment.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

__all__ = ["MultiProcessAdapter", "configure", "get_logger"]


def configure(level: str | None) -> None:
    """Make this library's own lines visible on stderr, unless the program set up logging itself.

    Args:
        level: Name of a logging level; None: ``info``.
    """
    ours = logging.getLogger("drivetrain")
    if level is not None:
        ours.setLevel(level.upper())
    if ours.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[drivetrain] %(message)s"))
    ours.addHandler(handler)
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def _rank_and_size() -> tuple[int, int]:
    from drivetrain import state
    from drivetrain.world import Topology

    runtime = state.current()
    if runtime is not None:
        return runtime.run.world.rank, runtime.run.world.size
    topology = Topology.from_environment()
    return topology.rank, topology.size


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose calls take two more keywords.

    ``main_process_only`` (default True): only rank 0 logs. ``in_order`` (default False): every rank logs, one after
    the other; all ranks must make the call, since they wait for each other.
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on the ranks asked for; lines of several ranks start with ``[RANK i]``."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level) and not in_order:
            return
        rank, size = _rank_and_size()
        if main_only and not in_order:
            if rank == 0:
                self._write(level, msg, args, kwargs)
        elif not in_order:
            self._write(level, f"[RANK {rank}] {msg}", args, kwargs)
        else:
            from drivetrain.state import PartialState

            for turn in range(size):
                if turn == rank and self.isEnabledFor(level):
                    self._write(level, f"[RANK {rank}] {msg}", args, kwargs)
                PartialState().wait_for_everyone()

    def _write(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        text, options = self.process(msg, dict(kwargs))
        options["stacklevel"] = options.get("stacklevel", 1) + 2  # past this function and `log`
        self.logger.log(level, text, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Warn, but the same text only once in this process."""
        key = (str(msg), tuple(map(repr, args)))
        if key not in self._warned:
            self._warned.add(key)
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    _warned: ClassVar[set[tuple[str, tuple[str, ...]]]] = set()


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger that speaks on the main process only, unless told otherwise in the call.

    Args:
        name: As for ``logging.getLogger``.
        log_level: Level of this logger alone; the root logger's stays as it is.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
