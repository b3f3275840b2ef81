"""The sections given in code, under the names that existing scripts use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler
from drivetrain_fp8.config import TeConfig, TorchaoConfig

__all__ = ["AORecipeKwargs", "FP8RecipeKwargs", "TERecipeKwargs"]


class _Recipe(KwargsHandler):
    """Passing one, be it empty, says which member of the family is meant by ``mixed_precision="fp8"``."""

    def settings(self) -> dict[str, Any]:
        """The explicitly given fields as configuration keys; the empty section if there are none."""
        given = self.values()
        options = given.pop("options", {})
        given |= {f"options.{name}": value for name, value in options.items()}
        return {f"{self.section}.{name}": value for name, value in given.items()} or {self.section: {}}


@attrs.frozen(kw_only=True)
class AORecipeKwargs(_Recipe):
    """Float8 by torchao given in code: ``Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(...)])``.

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``, in place of a recipe by name.
        module_filter_func: Called with a layer and its name; whether it is converted.
        recipe: ``"tensorwise"``, ``"rowwise"`` or ``"rowwise_with_gw_hp"``.
        pad_inner_dim: Fill inner dimensions up with zeros, so that batches may have any number of rows.
        enable_fsdp_float8_all_gather: Gather sharded weights in 8 bits.

    None, everywhere: as configured outside the code.

    Raises:
        ValueError: Two of them contradict each other.
    """

    section: ClassVar[str] = "fp8-torchao"

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    recipe: str | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __attrs_post_init__(self) -> None:
        TorchaoConfig(**self.values())  # finds whatever contradicts

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the section's names."""
        return _renamed(
            super().values(),
            config="linear_config",
            module_filter_func="filter",
            enable_fsdp_float8_all_gather="float8_all_gather",
        )


@attrs.frozen(kw_only=True)
class TERecipeKwargs(_Recipe):
    """Transformer Engine given in code: ``Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(...)])``.

    Settings of delayed scaling choose that recipe. The engine has no ``interval`` and no ``override_linear_precision``
    any more: they are taken only with the values that mean nothing.

    Attributes:
        use_autocast_during_eval: Compute in 8 bits in evaluation mode too.
        margin: Powers of two that scales stay below what the largest value allows.
        fp8_format: ``"HYBRID"`` or ``"E4M3"``.
        amax_history_len: Steps over which the largest value is taken.
        amax_compute_algo: ``"max"`` or ``"most_recent"``.
        use_mxfp8_block_scaling: The recipe ``MXFP8BlockScaling``.
        interval: 1.
        override_linear_precision: Three times False.

    None, everywhere: as configured outside the code.

    Raises:
        ValueError: The engine has no such setting, or two contradict each other.
    """

    section: ClassVar[str] = "fp8-te"

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    use_mxfp8_block_scaling: bool | None = None
    interval: int | None = None
    override_linear_precision: Sequence[bool] | None = None

    def __attrs_post_init__(self) -> None:
        if self.interval not in (None, 1):
            raise ValueError(
                f"interval={self.interval}: Transformer Engine computes scales in every step; leave it out"
            )
        if any(self.override_linear_precision or ()):
            raise ValueError(
                "override_linear_precision: Transformer Engine has no such setting any more; another recipe may have "
                "what you need (backward_override)"
            )
        if self.use_mxfp8_block_scaling and self._options(_DELAYED):
            raise ValueError(
                f"use_mxfp8_block_scaling contradicts {', '.join(self._options(_DELAYED))}, which delayed scaling has"
            )
        TeConfig(**self.values())

    def _options(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the section's names."""
        found: dict[str, Any] = {}
        if self.use_autocast_during_eval is not None:
            found["in_evaluation"] = self.use_autocast_during_eval
        options = self._options((*_DELAYED, "margin", "fp8_format"))
        if options or self.use_mxfp8_block_scaling:
            found["recipe"] = "MXFP8BlockScaling" if self.use_mxfp8_block_scaling else "DelayedScaling"
        return {**found, "options": options} if options else found


_DELAYED = ("amax_history_len", "amax_compute_algo")
"""Settings that only delayed scaling has."""


def _upper(name: Any) -> str:
    return str(name).upper()


_ENGINES: Mapping[str, type[_Recipe]] = {"TE": TERecipeKwargs, "AO": AORecipeKwargs}


@attrs.frozen(kw_only=True)
class FP8RecipeKwargs(TERecipeKwargs):
    """Either member given in code, as older scripts do. Prefer :class:`TERecipeKwargs` or :class:`AORecipeKwargs`.

    Attributes:
        backend: ``"TE"`` (the default) or ``"AO"``, which takes no further settings here.

    The others are those of :class:`TERecipeKwargs`.

    Raises:
        ValueError: The backend is another, or does not have the settings that are given.
    """

    backend: str = attrs.field(default="TE", converter=_upper)

    def __attrs_post_init__(self) -> None:
        if self.backend not in _ENGINES:
            raise ValueError(f"backend={self.backend!r} is none of: {', '.join(_ENGINES)}")
        super().__attrs_post_init__()
        if self.backend == "AO" and self.values():
            raise ValueError("these settings are Transformer Engine's; give torchao's as AORecipeKwargs(...)")

    def settings(self) -> dict[str, Any]:
        """The explicitly given fields as configuration keys; the empty section if there are none."""
        return super().settings() if self.backend == "TE" else AORecipeKwargs().settings()


def _renamed(given: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in given.items()}
