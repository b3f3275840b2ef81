"""How configuration files of Accelerate's ask for XLA."""

from __future__ import annotations

from drivetrain.plugin import Migration

__all__ = ["MIGRATION"]

MIGRATION = Migration(section="xla_config", where={"distributed_type": ("xla", "tpu")}, keys={})
