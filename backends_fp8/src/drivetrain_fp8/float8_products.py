"""Whether a device multiplies matrices of 8-bit numbers, and what speaks against a configuration."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.plugin import Capabilities, Check
from drivetrain_fp8.config import TorchaoConfig

if TYPE_CHECKING:
    import torch

__all__ = ["checks", "emulated", "gathers", "missing_products", "reason_against"]

GATHERS = "all_gather_extensions"
"""Feature of backends that let a parameter say itself how it is gathered."""


def emulated(config: TorchaoConfig, device_type: str) -> bool:
    """Whether values are rounded to 8 bits but multiplied in the compute dtype."""
    if config.emulate is not None:
        return config.emulate
    return bool(getattr(config.linear_config, "emulate", False)) or device_type == "cpu"


def _asks_for_gather(config: TorchaoConfig) -> bool:
    given = config.float8_all_gather
    return bool(getattr(config.linear_config, "enable_fsdp_float8_all_gather", False)) if given is None else given


def gathers(config: TorchaoConfig, capabilities: Capabilities) -> bool:
    """Whether sharded weights are gathered in 8 bits."""
    if GATHERS not in capabilities.features:
        return False
    by_itself = config.float8_all_gather is None and config.recipe == "tensorwise" and config.linear_config is None
    return by_itself or _asks_for_gather(config)


def reason_against(config: TorchaoConfig, capabilities: Capabilities, device_type: str) -> str | None:
    """Why this can't be had with that backend or device; None if it can."""
    if _asks_for_gather(config) and GATHERS not in capabilities.features:
        return (
            f"fp8-torchao.float8_all_gather: true needs a backend whose parameters say themselves how they are "
            f"gathered ({GATHERS}), which this one does not offer; leave it out"
        )
    problem = _import_problem()
    if problem is not None or emulated(config, device_type):
        return problem
    missing = missing_products(device_type, rowwise=config.recipe != "tensorwise")
    if missing is None:
        return None
    cure = "" if config.recipe == "tensorwise" else "recipe: tensorwise may work; "
    return (
        f"it has no products of 8-bit matrices ({missing}); {cure}fp8-torchao.emulate: true rounds the same and "
        f"multiplies in bfloat16"
    )


def missing_products(device_type: str, rowwise: bool) -> str | None:
    """What torch says when it is asked for such a product on a device; None if it computes one.

    Args:
        device_type: Of torch.
        rowwise: With a scale for each row instead of one for all.
    """
    import torch

    try:
        values = torch.ones(16, 16, device=device_type).to(torch.float8_e4m3fn)
        torch._scaled_mm(values, values.t(), *_scales(device_type, rowwise), out_dtype=torch.bfloat16)
    except Exception as error:  # whatever a device raises where it can't
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _scales(device_type: str, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((16, 1), (1, 16)) if rowwise else ((), ())
    return torch.ones(shapes[0], device=device_type), torch.ones(shapes[1], device=device_type)


def _import_problem() -> str | None:
    """Why the engine can't be imported. Asked early: later, other ranks would wait for this one meanwhile."""
    try:
        with _quiet_import():
            import torchao.float8  # noqa: F401
    except Exception as error:  # an engine that is broken may raise anything
        return f"torchao.float8 can't be imported: {type(error).__name__}: {error}"
    return None


_NO_NEWS = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum 'KernelPreference'> is an Enum subclass",
}
"""How that begins which the engine's import says on every rank, by logger: of its kernels for inference, which it
brings for all GPUs at once and which training in float8 doesn't use, and to its own authors."""


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Context in which the engine may be imported without saying what is no news to a user."""
    filters = {name: functools.partial(_is_news, beginning) for name, beginning in _NO_NEWS.items()}
    for name, one in filters.items():
        logging.getLogger(name).addFilter(one)
    try:
        yield
    finally:
        for name, one in filters.items():
            logging.getLogger(name).removeFilter(one)


def _is_news(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


def checks() -> Iterator[Check]:
    """Rows for the doctor."""
    problem = _import_problem()
    if problem is not None:
        yield Check("torchao.float8", False, problem, "install the torchao that was made for your torch")
        return
    import torch
    from torchao import __version__

    yield Check("torchao.float8", True, __version__)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield Check("products in 8 bits", None, "no accelerator here; emulated on the CPU")
        return
    for words, rowwise in (("tensorwise", False), ("rowwise", True)):
        missing = missing_products(accelerator.type, rowwise)
        yield Check(f"products in 8 bits, {words}", True if missing is None else None, missing or accelerator.type)
