"""Settings given in code for what core itself does. Plugins export handlers of their own."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler

__all__ = ["AutocastKwargs", "GradScalerKwargs", "TorchDynamoPlugin"]


@attrs.frozen
class AutocastKwargs(KwargsHandler):
    """How ``accelerator.autocast()`` and the forward of prepared models compute.

    Attributes:
        enabled: False leaves the model's own dtypes alone.
        cache_enabled: Whether casts of weights are kept for the length of the context.
    """

    section: ClassVar[str] = ""
    enabled: bool = True
    cache_enabled: bool = True


@attrs.frozen
class GradScalerKwargs(KwargsHandler):
    """The loss scaler of ``mixed_precision: fp16``; fields as in ``torch.amp.GradScaler``."""

    section: ClassVar[str] = "fp16"
    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    enabled: bool | None = None


def _in_small_letters(value: Any) -> str | None:
    """A compiler's name; scripts give it in capitals too, or as a member of an enumeration."""
    return None if value is None else str(getattr(value, "value", value)).lower()


@attrs.frozen
class TorchDynamoPlugin(KwargsHandler):
    """How prepared models are compiled: the settings ``compile`` given in code, under the names scripts know.

    Attributes:
        backend: Compiler that ``torch.compile`` uses, such as ``"inductor"``; ``"no"`` compiles nothing.
        mode: Preset of the compiler.
        fullgraph: Whether a part that can't be compiled is an error.
        dynamic: Whether to compile for changing shapes.
        options: For the compiler itself.
        disable: Compile nothing, whatever the configuration says.
        use_regional_compilation: True is refused: call ``block.compile()`` for each block before ``prepare``.

    None, everywhere: as configured outside the code. What is given turns compilation on.

    Raises:
        ValueError: ``use_regional_compilation`` is asked for.
    """

    section: ClassVar[str] = "compile"
    backend: str | None = attrs.field(default=None, converter=_in_small_letters)
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __attrs_post_init__(self) -> None:
        if self.use_regional_compilation:
            raise ValueError(
                "use_regional_compilation=True is not offered; call block.compile() for each repeated block of the "
                "model before prepare(), and leave the plugin out"
            )

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the names of the setting's own."""
        given = super().values()
        return {name: value for name, value in given.items() if name not in ("disable", "use_regional_compilation")}

    def settings(self) -> dict[str, Any]:
        """The explicitly given fields as configuration keys."""
        return {"compile": False} if self.disable or self.backend == "no" else super().settings()
