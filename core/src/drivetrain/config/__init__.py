"""Settings: what they are, where each came from, and which one won.

``resolve()`` merges defaults, the YAML file, the environment, the command line and the arguments given in code, in that
order of precedence. Every value keeps its origin, so that an error names file, line and column, and the log can say
what was overridden by what. Nothing here imports torch, and plugins are known by their metadata only.
"""

from __future__ import annotations

from drivetrain.config.files import default_config_file
from drivetrain.config.resolve import resolve
from drivetrain.config.resolved import Override, Resolved, Row, load_resolved
from drivetrain.config.schema import CompileConfig, RunConfig
from drivetrain.config.values import Origin

__all__ = [
    "CompileConfig",
    "Origin",
    "Override",
    "Resolved",
    "Row",
    "RunConfig",
    "default_config_file",
    "load_resolved",
    "resolve",
]
