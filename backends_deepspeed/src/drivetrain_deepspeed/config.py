"""Section ``deepspeed`` of the YAML."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from drivetrain_deepspeed.engine_file import EngineFile, read_engine_file

__all__ = ["DEFAULT_STAGE", "DeepSpeedConfig", "OffloadConfig", "engine_values"]

DEFAULT_STAGE = 2
"""ZeRO stage where neither the section nor the file names one."""

_Dtype = Literal["fp32", "fp16", "bf16"]
_OffloadDevice = Literal["cpu", "nvme", "none"]

_a_dtype = attrs.validators.optional(attrs.validators.in_(typing.get_args(_Dtype)))
_natural = attrs.validators.optional(attrs.validators.ge(0))


def _engine(path: str, help: str) -> dict[str, str]:
    """Metadata of a field that stands for one of the engine's own; null leaves it to the file, or to its default."""
    return {"help": help, "engine": path}


def _stage(instance: Any, attribute: Any, value: int | None) -> None:
    if value is not None and value not in (0, 1, 2, 3):
        raise ValueError(f"{attribute.name} must be 0 (nothing is cut), 1, 2 or 3, got {value}")


@attrs.frozen(kw_only=True)
class OffloadConfig:
    """Section ``deepspeed.offload_optimizer`` or ``deepspeed.offload_param``."""

    device: _OffloadDevice | None = attrs.field(
        default=None,
        metadata=_engine("device", "where it is kept: host memory (cpu), NVMe (nvme), or the device itself (none)"),
    )
    nvme_path: str | None = attrs.field(
        default=None, metadata=_engine("nvme_path", "folder on the NVMe, for device: nvme")
    )
    pin_memory: bool | None = attrs.field(
        default=None, metadata=_engine("pin_memory", "keep it in page-locked memory, which copies faster")
    )

    def __attrs_post_init__(self) -> None:
        if self.device not in (None, *typing.get_args(_OffloadDevice)):
            raise ValueError(f"device must be one of {', '.join(typing.get_args(_OffloadDevice))}, got {self.device!r}")
        if self.device == "nvme" and self.nvme_path is None:
            raise ValueError("device: nvme needs nvme_path, a folder on that drive")
        if self.nvme_path is not None and self.device not in (None, "nvme"):
            raise ValueError(f"nvme_path has no effect with device: {self.device}")


def _as_names(value: Any) -> Any:
    """A list of names; a text with commas is split."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return None if value is None else tuple(value)


@attrs.frozen(kw_only=True)
class DeepSpeedConfig:
    """Section ``deepspeed``. Settings that are null are the file's, or else the engine's defaults."""

    config_file: str | dict[str, Any] | None = attrs.field(
        default=None,
        metadata={
            "help": "the engine's own configuration: path of a JSON file, or its content; `auto` in it is filled in "
            "from the run"
        },
    )
    zero_stage: int | None = attrs.field(
        default=None,
        validator=_stage,
        metadata=_engine(
            "zero_optimization.stage",
            "what is cut over ranks: nothing (0), optimizer state (1), and gradients (2), and parameters (3); null: "
            "the file's, else 2",
        ),
    )
    offload_optimizer: OffloadConfig | None = attrs.field(
        default=None,
        metadata=_engine(
            "zero_optimization.offload_optimizer",
            "keep optimizer state off the device, and update there; stages 1 to 3",
        ),
    )
    offload_param: OffloadConfig | None = attrs.field(
        default=None,
        metadata=_engine("zero_optimization.offload_param", "keep parameters off the device between uses; stage 3"),
    )
    gradient_clipping: float | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine(
            "gradient_clipping",
            "largest 2-norm of a model's gradients in every update, beside what the program clips; null or 0: no limit",
        ),
    )
    zero3_init: bool = attrs.field(
        default=True, metadata={"help": "stage 3: models built under init_context() are cut while they are built"}
    )
    zero3_save_16bit_model: bool | None = attrs.field(
        default=None,
        metadata=_engine(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "let the engine's own save_16bit_model() gather the weights; save_model() always does",
        ),
    )
    leaf_modules: list[str] | str | None = attrs.field(
        default=None,
        converter=_as_names,
        metadata={
            "help": "stage 3: class names of modules that are gathered as one, such as a mixture of experts",
            "engine": "zero_optimization.leaf_module.classes",
        },
    )
    train_batch_min: bool = attrs.field(
        default=True,
        metadata={"help": "of several loaders, the smallest batch size is the engine's; false: the largest"},
    )
    contiguous_gradients: bool | None = attrs.field(
        default=None,
        metadata=_engine("zero_optimization.contiguous_gradients", "copy gradients into one buffer as they come"),
    )
    overlap_comm: bool | None = attrs.field(
        default=None, metadata=_engine("zero_optimization.overlap_comm", "reduce gradients while backward runs")
    )
    reduce_scatter: bool | None = attrs.field(
        default=None,
        metadata=_engine(
            "zero_optimization.reduce_scatter", "reduce each gradient to the rank that keeps it, not to all"
        ),
    )
    round_robin_gradients: bool | None = attrs.field(
        default=None,
        metadata=_engine(
            "zero_optimization.round_robin_gradients", "stages 1 and 2: spread copies to host memory over ranks"
        ),
    )
    reduce_bucket_size: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine("zero_optimization.reduce_bucket_size", "elements reduced at a time"),
    )
    allgather_bucket_size: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine("zero_optimization.allgather_bucket_size", "stages 1 and 2: elements gathered at a time"),
    )
    sub_group_size: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine("zero_optimization.sub_group_size", "stage 3: elements updated at a time"),
    )
    prefetch_bucket_size: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine("zero_optimization.stage3_prefetch_bucket_size", "stage 3: elements gathered ahead"),
    )
    param_persistence_threshold: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine(
            "zero_optimization.stage3_param_persistence_threshold",
            "stage 3: parameters with fewer elements stay whole on every rank; null: the engine's 100000",
        ),
    )
    max_live_parameters: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine("zero_optimization.stage3_max_live_parameters", "stage 3: elements that are whole at once"),
    )
    max_reuse_distance: int | None = attrs.field(
        default=None,
        validator=_natural,
        metadata=_engine(
            "zero_optimization.stage3_max_reuse_distance",
            "stage 3: parameters needed again within so many elements are kept",
        ),
    )
    communication_data_type: _Dtype | None = attrs.field(
        default=None,
        validator=_a_dtype,
        metadata=_engine(
            "communication_data_type", "dtype in which gradients are reduced; null: that of the parameters"
        ),
    )
    grad_accum_dtype: _Dtype | None = attrs.field(
        default=None,
        validator=_a_dtype,
        metadata=_engine(
            "data_types.grad_accum_dtype", "dtype in which gradients are added up; null: that of the parameters"
        ),
    )
    extensions_dir: str | None = attrs.field(
        default=None,
        metadata={"help": "folder that compiled operations are kept in (TORCH_EXTENSIONS_DIR); null: torch's own"},
    )

    def __attrs_post_init__(self) -> None:
        file = self.file
        for name, path, value in engine_values(self):
            said = file.get(path)
            if said not in (None, "auto", value):
                raise ValueError(f"{name} is {_text(value)} here, and {path} in {file.name} is {_text(said)}")
        self._check_offload("offload_optimizer", (1, 2, 3), nvme=(3,))
        self._check_offload("offload_param", (3,), nvme=(3,))

    def _check_offload(self, name: str, stages: tuple[int, ...], nvme: tuple[int, ...]) -> None:
        device = self.offload_device(name)
        allowed = nvme if device == "nvme" else stages
        if device is not None and self.stage not in allowed:
            offered = " and ".join(map(str, allowed))
            raise ValueError(f"{name} to {device} needs zero_stage {offered}, and this is stage {self.stage}")

    @property
    def file(self) -> EngineFile:
        """The engine's own configuration, as the user wrote it; empty without one."""
        return read_engine_file(self.config_file)

    @property
    def stage(self) -> int:
        """ZeRO stage: the section's, else the file's, else 2."""
        if self.zero_stage is not None:
            return self.zero_stage
        said = self.file.get("zero_optimization.stage")
        return DEFAULT_STAGE if said in (None, "auto") else int(said)

    def offload_device(self, name: str) -> str | None:
        """Where ``offload_optimizer`` or ``offload_param`` keeps its part: ``cpu`` or ``nvme``; None: on the device."""
        offload: OffloadConfig | None = getattr(self, name)
        device = None if offload is None else offload.device
        if device is None:
            device = self.file.get(f"zero_optimization.{name}.device")
        return None if device in (None, "none", "auto") else str(device)

    def without_sizes(self) -> DeepSpeedConfig:
        """The same without buffer sizes, which may follow from a model that is not there yet."""
        content = dict(self.file.content)
        zero = {key: value for key, value in content.get("zero_optimization", {}).items() if value != "auto"}
        return attrs.evolve(self, config_file={**content, "zero_optimization": zero})

    @property
    def clipping(self) -> float:
        """Largest norm of every update; 0: none."""
        said = self.gradient_clipping if self.gradient_clipping is not None else self.file.get("gradient_clipping")
        return 0.0 if said in (None, "auto") else float(said)


def engine_values(config: DeepSpeedConfig) -> Iterator[tuple[str, str, Any]]:
    """What the section sets of the engine's configuration: field, path there with dots, value."""
    for field in attrs.fields(DeepSpeedConfig):
        value = getattr(config, field.name)
        if value is None or "engine" not in field.metadata:
            continue
        if isinstance(value, OffloadConfig):
            for inner in attrs.fields(OffloadConfig):
                if getattr(value, inner.name) is not None:
                    path = f"{field.metadata['engine']}.{inner.metadata['engine']}"
                    yield f"{field.name}.{inner.name}", path, getattr(value, inner.name)
        else:
            yield field.name, field.metadata["engine"], list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
