"""Whether the engine's own configuration agrees with what was prepared."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigError
from drivetrain.state import current
from drivetrain_deepspeed import engine_config
from drivetrain_deepspeed.config import DeepSpeedConfig
from drivetrain_deepspeed.engine_config import Setting

if TYPE_CHECKING:
    from drivetrain.bundle import Bundle
    from drivetrain.world import Run
    from drivetrain_deepspeed.engines import Engines

__all__ = ["check", "tell_batch_size"]

logger = logging.getLogger(__name__)


def check(run: Run, config: DeepSpeedConfig, bundle: Bundle) -> None:
    """Compare the file with the run and the loaders.

    Raises:
        ConfigError: They contradict each other; the text has one line for each field.
    """
    file = config.file
    precision = Setting(key="mixed_precision", value=run.names["precision"], origin=_origin("mixed_precision"))
    steps = bundle.gradient_accumulation_steps
    configured = run.config.gradient_accumulation_steps
    where = _origin("gradient_accumulation_steps") if steps == configured else "Accelerator(...)"
    accumulation = Setting(key="gradient_accumulation_steps", value=steps, origin=where)
    lines = engine_config.disagreements(
        file, compute=run.policy.compute, precision=precision, accumulation=accumulation
    )
    engine_config.check_agreement(file, lines)
    if bundle.optimizers and file.get("scheduler") is not None and not bundle.schedulers:
        logger.warning("the scheduler in %s moves nothing unless a DummyScheduler is prepared in its place", file.name)
    for loader in bundle.loaders:
        if loader.batch_size is None and file.get("train_micro_batch_size_per_gpu") == "auto":
            raise ConfigError(
                f"train_micro_batch_size_per_gpu is auto in {file.name}, but a prepared loader has batches of sizes of "
                f"their own (a batch sampler's); write a number"
            )
        engine_config.check_batches(file, micro=loader.batch_size, steps=steps, processes=run.world.data_size)


def _origin(key: str) -> str:
    runtime = current()
    return "default" if runtime is None else str(runtime.resolved.origin(key))


def tell_batch_size(engines: Engines, config: DeepSpeedConfig, bundle: Bundle) -> None:
    """Tell every engine how large a micro-batch is, for what it reports of its speed."""
    sizes: list[Any] = [loader.batch_size for loader in bundle.loaders if loader.batch_size is not None]
    if sizes:
        engines.tell_batch_size(min(sizes) if config.train_batch_min else max(sizes))
