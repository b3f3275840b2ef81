"""Settings given in code for what core itself does. Plugins export handlers of their own."""

from __future__ import annotations

from typing import ClassVar

import attrs

from drivetrain.plugin import KwargsHandler

__all__ = ["AutocastKwargs", "GradScalerKwargs"]


@attrs.frozen(kw_only=True)
class AutocastKwargs(KwargsHandler):
    """How ``accelerator.autocast()`` and the forward of prepared models compute.

    Attributes:
        enabled: False leaves the model's own dtypes alone.
        cache_enabled: Whether casts of weights are kept for the length of the context.
    """

    section: ClassVar[str] = ""
    enabled: bool = True
    cache_enabled: bool = True


@attrs.frozen(kw_only=True)
class GradScalerKwargs(KwargsHandler):
    """The loss scaler of ``mixed_precision: fp16``; fields as in ``torch.amp.GradScaler``."""

    section: ClassVar[str] = "fp16"
    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    enabled: bool | None = None
