"""The section ``deepspeed`` given in code, under the names that existing scripts use."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from drivetrain.plugin import KwargsHandler
from drivetrain_deepspeed.config import DeepSpeedConfig, OffloadConfig
from drivetrain_deepspeed.engine_file import EngineFile, read_engine_file

__all__ = ["DeepSpeedPlugin"]

_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
"""For each section of the engine's file that turns on a precision, its name here."""


def _source(value: Any) -> Any:
    """A path or the content; a text that is the content, encoded, is decoded."""
    if value is None or isinstance(value, Mapping):
        return value
    text = os.fspath(value)
    if os.path.exists(text):
        return text
    try:
        content = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError):
        return text
    return content


@attrs.frozen(kw_only=True)
class DeepSpeedPlugin(KwargsHandler):
    """ZeRO given in code: ``Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))``.

    It chooses the backend too. It only describes: it reads and writes no environment variables, and may be used for any
    number of runs.

    Attributes:
        hf_ds_config: The engine's own configuration: path of a JSON file, its content, or that in base64. Numbers of
            micro-batches and a precision in it become settings of the run.
        gradient_accumulation_steps: Micro-batches in a group.
        gradient_clipping: Largest norm of every update.
        zero_stage: 0, 1, 2 or 3.
        is_train_batch_min: Of several loaders, whether the smallest batch size is the engine's.
        offload_optimizer_device: ``"cpu"``, ``"nvme"`` or ``"none"``.
        offload_param_device: The same, at stage 3.
        offload_optimizer_nvme_path: Folder for ``"nvme"``.
        offload_param_nvme_path: Folder for ``"nvme"``.
        zero3_init_flag: Whether models built under ``init_context()`` are cut while they are built.
        zero3_save_16bit_model: Whether the engine's own ``save_16bit_model`` gathers weights.
        transformer_moe_cls_names: Classes gathered as one at stage 3, a list or a text with commas.
        enable_msamp: Only False is accepted: that library's formats are not offered.
        msamp_opt_level: The same.

    None, everywhere: as configured outside the code.

    Raises:
        ValueError: A value is no choice, contradicts the engine's configuration, or that can't be read.
    """

    section: ClassVar[str] = "deepspeed"
    selects: ClassVar[str | None] = "deepspeed"

    hf_ds_config: Any = attrs.field(default=None, converter=_source)
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: Sequence[str] | str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ValueError(
                "MS-AMP is not offered; for 8-bit formats install a precision and use mixed_precision: fp8"
            )
        values = self.values()
        values |= {name: OffloadConfig(**values[name]) for name in _OFFLOADS if name in values}
        DeepSpeedConfig(**values)  # finds whatever contradicts

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the section's names."""
        named = {
            "config_file": self.hf_ds_config,
            "gradient_clipping": self.gradient_clipping,
            "zero_stage": self.zero_stage,
            "train_batch_min": self.is_train_batch_min,
            "zero3_init": self.zero3_init_flag,
            "zero3_save_16bit_model": self.zero3_save_16bit_model,
            "leaf_modules": self.transformer_moe_cls_names,
            **{name: self._offload(name) for name in _OFFLOADS},
        }
        return {name: value for name, value in named.items() if value is not None}

    def _offload(self, name: str) -> dict[str, str] | None:
        given = {"device": getattr(self, f"{name}_device"), "nvme_path": getattr(self, f"{name}_nvme_path")}
        return {key: value for key, value in given.items() if value is not None} or None

    def settings(self) -> dict[str, Any]:
        """The explicitly given fields as configuration keys, and what the engine's configuration says of core's."""
        found: dict[str, Any] = {}
        for name, value in self.values().items():
            if name in _OFFLOADS:
                found |= {f"deepspeed.{name}.{key}": inner for key, inner in value.items()}
            else:
                found[f"deepspeed.{name}"] = value
        return {**_core_settings(read_engine_file(self.hf_ds_config)), **found, **self._accumulation()}

    def _accumulation(self) -> dict[str, int]:
        steps = self.gradient_accumulation_steps
        return {} if steps is None else {"gradient_accumulation_steps": steps}


_OFFLOADS = ("offload_optimizer", "offload_param")


def _core_settings(file: EngineFile) -> dict[str, Any]:
    """Core's settings that the engine's configuration decides, since it was given in code like they would be."""
    found: dict[str, Any] = {}
    steps = file.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        found["gradient_accumulation_steps"] = steps
    for section, precision in _PRECISIONS.items():
        if file.get(f"{section}.enabled") is True:
            found["mixed_precision"] = precision
    return found
