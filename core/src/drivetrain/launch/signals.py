"""Signals that ask the launcher to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["SignalGate", "Stopped", "signal_name"]


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGTERM``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Stopped(BaseException):
    """The launcher was told to stop. No ``Exception``, so that nobody's error handling swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal_name(signum))
        self.signum = signum


class SignalGate:
    """Turns the first signal that asks the launcher to end into :class:`Stopped`, and later ones into haste.

    A context. Without effect off the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The first signal that came."""
        self.hasty = False
        """Whether more came: the user does not want to wait."""
        self._held = False
        self._saved: dict[int, Any] = {}

    def __enter__(self) -> SignalGate:
        if threading.current_thread() is threading.main_thread():
            names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
            numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
            self._saved = {number: signal.getsignal(number) for number in numbers}
            self.install()
        return self

    def install(self) -> None:
        """Take the signals, again if somebody has taken them since. One that was ignored stays so (``nohup``)."""
        for number, handler in self._saved.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            self.hasty = True
            return
        self.signum = signum
        if not self._held:
            raise Stopped(signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context at whose end a signal that came in it counts: a process is started, and known to who stops it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.signum is not None:
            raise Stopped(self.signum)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
