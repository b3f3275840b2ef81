"""What Transformer Engine says of the machine: in errors, before anything is allocated, and in the doctor's rows."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.plugin import Check
from drivetrain_fp8.config import TeRecipe

__all__ = ["checks", "reason_against"]

_PROBES: Mapping[str | None, str] = {
    "Float8BlockScaling": "is_fp8_block_scaling_available",
    "MXFP8BlockScaling": "is_mxfp8_available",
    "NVFP4BlockScaling": "is_nvfp4_available",
}
"""The engine's question for a recipe; for the others it is ``is_fp8_available``."""

_INSTALL = "on a machine with an NVIDIA GPU: pip install --no-build-isolation 'drivetrain-fp8[te]'"


def reason_against(device_type: str, recipe: str | None) -> str | None:
    """Why the engine can't compute with a recipe on this type of device; None if it can.

    Args:
        device_type: Of torch.
        recipe: Name of the engine's class; None: what the engine chooses by itself.
    """
    if device_type != "cuda":
        return (
            f"Transformer Engine computes on NVIDIA GPUs, and this run is on {device_type}; fp8-torchao runs on any "
            f"device"
        )
    problem = _import_problem()
    if problem is not None:
        return f"{problem}; {_INSTALL}"
    available, reason = _ask(recipe)
    return None if available else f"Transformer Engine says of {recipe or 'fp8'} here: {reason}"


def _import_problem() -> str | None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # it loads libraries of its own, and raises whatever their absence makes it raise
        text = str(error).strip().splitlines() or [""]
        return f"transformer_engine.pytorch can't be imported: {type(error).__name__}: {text[0]}"
    return None


def _ask(recipe: str | None) -> tuple[bool, str]:
    import transformer_engine.pytorch as te

    probe: Any = getattr(te, _PROBES.get(recipe, "is_fp8_available"))
    try:
        available, reason = probe(return_reason=True)
    except Exception as error:  # without a GPU the engine's own question fails
        return False, f"{type(error).__name__}: {error}"
    return bool(available), str(reason)


def checks() -> Iterator[Check]:
    """Rows for the doctor."""
    problem = _import_problem()
    if problem is not None:
        yield Check("transformer_engine", None, problem, _INSTALL)
        return
    import transformer_engine

    yield Check("transformer_engine", True, str(getattr(transformer_engine, "__version__", "")))
    for recipe in typing.get_args(TeRecipe):
        available, reason = _ask(recipe)
        yield Check(recipe, True if available else None, reason)
