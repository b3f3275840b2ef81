"""The process group's settings given in code."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler
from drivetrain.validators import of_type

__all__ = ["InitProcessGroupKwargs"]


def _positive_duration(instance: Any, attribute: attrs.Attribute, value: timedelta | None) -> None:
    if value is not None and value <= timedelta(0):
        raise ValueError(f"{attribute.name} must be above zero, got {value}")


_text = of_type(str, optional=True)


@attrs.frozen
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is made, given in code: ``Accelerator(kwargs_handlers=[InitProcessGroupKwargs(...)])``.

    It stands for keys of core, so it serves whichever backend was chosen, and does nothing where there is no group.

    Attributes:
        backend: Communication library, such as ``"gloo"``; the key ``collectives``.
        init_method: URL at which the processes meet, such as ``"tcp://10.0.0.1:29500"``; the key ``init_method``.
        timeout: Longest that a rank waits for the others in a collective; the key ``collective_timeout``.

    None, everywhere: as configured outside the code.

    Raises:
        TypeError: ``timeout`` is no ``datetime.timedelta``, or one of the others no text.
        ValueError: ``timeout`` is not above zero.
    """

    section: ClassVar[str] = ""

    backend: str | None = attrs.field(default=None, validator=_text)
    init_method: str | None = attrs.field(default=None, validator=_text)
    timeout: timedelta | None = attrs.field(
        default=None, validator=[of_type(timedelta, optional=True), _positive_duration]
    )

    def settings(self) -> dict[str, Any]:
        """The given fields, under core's keys."""
        found = {
            "collectives": self.backend,
            "init_method": self.init_method,
            "collective_timeout": None if self.timeout is None else self.timeout.total_seconds(),
        }
        return {key: value for key, value in found.items() if value is not None}
