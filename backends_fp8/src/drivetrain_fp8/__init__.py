"""Precisions ``fp8-te`` and ``fp8-torchao``: the matrix products of chosen layers in 8-bit floating point.

Importing this package is light: torch and the engines are imported in the hooks.
"""

from __future__ import annotations

from drivetrain_fp8.config import TeConfig, TorchaoConfig
from drivetrain_fp8.handlers import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from drivetrain_fp8.precisions import Fp8Te, Fp8Torchao

__version__ = "0.1.0"

__all__ = [
    "AORecipeKwargs",
    "FP8RecipeKwargs",
    "Fp8Te",
    "Fp8Torchao",
    "TERecipeKwargs",
    "TeConfig",
    "TorchaoConfig",
    "__version__",
]
