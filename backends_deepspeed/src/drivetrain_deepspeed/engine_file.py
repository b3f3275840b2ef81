"""The engine's own configuration, JSON or inline: read, and looked over before anything is started."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

__all__ = ["EngineFile", "read_engine_file"]

INLINE = "config_file"
"""What a configuration is called that was not read from a file."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What the engine looks for at the top of its configuration. It passes over anything else without a word.
_TOP_KEYS = _words(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
    data_sparsity data_types dataloader_drop_last disable_allgather disable_python_gc dump_state eigenvalue
    elasticity expert_parallel flops_profiler fp16 fp32_allreduce gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine
    load_universal_checkpoint log_level managed_gradient_accumulation memory_breakdown monitor_config nebula
    optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism use_node_local_storage vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """
)
_ZERO_KEYS = _words(
    """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
    cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear
    model_persistence_threshold module_granularity_threshold offload_optimizer offload_param overlap_comm
    override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint
    prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
    sub_group_size use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
    """
)


@attrs.frozen
class EngineFile:
    """The content of a configuration, and what to call it in messages."""

    content: Mapping[str, Any] = attrs.field(factory=dict)
    name: str = INLINE

    def get(self, path: str) -> Any:
        """What is at a path with dots; None if nothing is."""
        found: Any = self.content
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def autos(self) -> Iterator[str]:
        """Paths at which it says ``auto``."""
        yield from _autos(self.content, "")


def _autos(content: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"


def read_engine_file(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> EngineFile:
    """Read a configuration and look it over.

    Args:
        source: Path of a JSON file, the content itself, or None: an empty one.

    Raises:
        ValueError: It can't be read, is no JSON object, has a key twice, or keys that the engine does not know. The
            text names file, line and column as far as there are any.
    """
    if source is None:
        return EngineFile()
    if isinstance(source, Mapping):
        file = EngineFile(dict(source))
    else:
        file = EngineFile(_load(Path(source).expanduser()), os.fspath(source))
    _check_keys(file)
    return file


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: no valid JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one JSON object, {{...}}, not a {type(content).__name__}")
    return content


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{path} has the key {key!r} twice in one object")
        found[key] = value
    return found


def _check_keys(file: EngineFile) -> None:
    _check_known(file, file.content, _TOP_KEYS, "")
    zero = file.content.get("zero_optimization")
    if isinstance(zero, Mapping):
        _check_known(file, zero, _ZERO_KEYS, "zero_optimization.")
        stage = zero.get("stage")
        if stage not in (None, "auto", 0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage in {file.name} must be 0, 1, 2 or 3, got {stage!r}")
    elif zero is not None:
        raise ValueError(f"zero_optimization in {file.name} must be an object, got {zero!r}")


def _check_known(file: EngineFile, content: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{file.name} has the key {prefix + str(key)!r}, which the engine does not know{hint}")
