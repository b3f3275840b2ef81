"""TCP ports of this machine."""

from __future__ import annotations

import socket

__all__ = ["free_port", "port_is_free"]


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


def _bind(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port whose last connection has just been closed counts as free, as it does for those who listen later.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
