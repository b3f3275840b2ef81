"""What the tests of all backends are run over."""

from __future__ import annotations

from drivetrain import registry

__all__ = ["backends_for_many"]


def backends_for_many() -> dict[str, bool]:
    """Installed backends that several processes can use, and whether each process holds a part of the parameters."""
    loaded, _ = registry.load_all("backend")
    claims = {name: found().capabilities for name, found in loaded.items()}
    return {name: claimed.shards_params for name, claimed in claims.items() if claimed.many_processes}
