"""Building a model at stage 3, so that no rank ever holds all of it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from drivetrain.world import Run
from drivetrain_deepspeed import engine_config, process
from drivetrain_deepspeed.config import DeepSpeedConfig

__all__ = ["cutting"]

_SIZES_BY_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


@contextlib.contextmanager
def cutting(run: Run, config: DeepSpeedConfig) -> Any:
    """Context in which parameters are cut over ranks as modules are built.

    Args:
        run: The run.
        config: The section. Buffer sizes that follow from the model's hidden size play no part yet.
    """
    import deepspeed

    settings = engine_config.build(config.without_sizes(), run.policy, nn.Module(), trains=True, optimizer=None)
    with process.told_local_rank(run), deepspeed.zero.Init(config_dict_or_path=settings):
        yield
