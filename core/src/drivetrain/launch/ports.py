"""TCP ports of this machine."""

from __future__ import annotations

import socket

__all__ = ["free_port", "is_port_in_use", "port_is_free"]


def free_port() -> int:
    """A port that nothing listens on right now."""
    return _bind("127.0.0.1", 0)


def port_is_free(port: int) -> bool:
    """Whether this machine can listen on a port."""
    try:
        _bind("", port)
    except OSError:
        return False
    return True


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether something listens on a port of this machine already; None: on 29500, torch's usual one."""
    return not port_is_free(29500 if port is None else int(port))


def _bind(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port whose last connection has just been closed counts as free, as it does for those who listen later.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
