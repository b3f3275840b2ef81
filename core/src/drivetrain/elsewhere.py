"""Names that scripts know from Accelerate and that are not here, each with what to use instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

__all__ = ["ATTRIBUTES", "INSTEAD", "KEYWORDS", "KnownElsewhere", "instead_of", "resolve"]

_TEXTS = "it is a text here"
_CHECKPOINT = "files of a checkpoint are listed in its manifest.json; drivetrain.checkpoint describes the layout"
_WEIGHTS = "save_model writes model.safetensors, or shards with model.safetensors.index.json"
_LAUNCH = "drivetrain.launch has launch_script, notebook_launcher and debug_launcher"
_STRUCTURE = "gather_object and broadcast_object_list send any structure"
_REGIONS = "call block.compile() for each repeated block before prepare()"
_QUANTIZED = "quantize the model with its own library, then prepare it"
_TIED = "prepare and save_model keep tied parameters tied"
_OTHER_AXES = "not offered; a backend that shards cuts a model over all ranks, or over shard_size of them"
_BIG_MODELS = "placing one model on several devices for inference is not offered; a backend that shards trains big ones"
_EMPTY = "accelerator.init_context() builds a model in parts under a backend that shards; else torch.device('meta')"
_HANDLERS = "accelerator.handlers() has those given in code, by class"
_PRECISION = "accelerator.mixed_precision names the precision"
_ORDER = "the order of samples is a function of seed and epoch, so no generator is synchronized"
_NUMACTL = "start the processes under numactl, or with the options of the job scheduler"

INSTEAD: Mapping[str, str] = {
    # choices that are enumerations there
    "ComputeEnvironment": "there is one kind: machines that one is on",
    "CustomDtype": f"{_TEXTS}, or a torch dtype",
    "DynamoBackend": f"{_TEXTS}: TorchDynamoPlugin(backend='inductor')",
    "LoggerType": f"{_TEXTS}: log_with='tensorboard'",
    "PrecisionType": f"{_TEXTS}: mixed_precision='bf16'",
    "RNGType": f"{_TEXTS}: synchronize_rng_states(['torch'])",
    "SageMakerDistributedType": "a cloud service runs the script as it is",
    # files
    "MODEL_NAME": _CHECKPOINT,
    "OPTIMIZER_NAME": _CHECKPOINT,
    "PROFILE_PATTERN_NAME": "ProfileKwargs(output_trace_dir=...) writes profile_<rank>.json",
    "RNG_STATE_NAME": _CHECKPOINT,
    "SAFE_MODEL_NAME": _CHECKPOINT,
    "SAFE_WEIGHTS_INDEX_NAME": _WEIGHTS,
    "SAFE_WEIGHTS_NAME": _WEIGHTS,
    "SAFE_WEIGHTS_PATTERN_NAME": _WEIGHTS,
    "SAMPLER_NAME": _CHECKPOINT,
    "SCALER_NAME": _CHECKPOINT,
    "SCHEDULER_NAME": _CHECKPOINT,
    "WEIGHTS_INDEX_NAME": _WEIGHTS,
    "WEIGHTS_NAME": _WEIGHTS,
    "WEIGHTS_PATTERN_NAME": _WEIGHTS,
    "clean_state_dict_for_safetensors": "save_model and accelerator.save untie shared tensors themselves",
    "convert_bytes": "max_shard_size takes texts such as '5GB'",
    "convert_file_size_to_int": "max_shard_size takes texts such as '5GB'",
    # tensors
    "GatheredParameters": "accelerator.get_state_dict(model) has the whole parameters",
    "TensorInformation": _STRUCTURE,
    "convert_outputs_to_fp32": "a prepared model returns float32 by itself; convert_to_fp32 casts nested data",
    "copy_tensor_to_devices": "broadcast sends a tensor to all ranks",
    "get_data_structure": _STRUCTURE,
    "ignorant_find_batch_size": "find_batch_size returns None where there is no tensor",
    "id_tensor_storage": "tensor.untyped_storage().data_ptr()",
    "initialize_tensors": _STRUCTURE,
    "is_tensor_information": _STRUCTURE,
    "pad_input_tensors": "split_between_processes(..., apply_padding=True)",
    # the process and its machine
    "PrepareForLaunch": _LAUNCH,
    "TORCH_LAUNCH_PARAMS": _LAUNCH,
    "are_libraries_initialized": "'torch' in sys.modules",
    "check_os_kernel": "nothing needs to be checked",
    "get_cpu_distributed_information": "PartialState() has rank, size and local rank",
    "get_current_device_type": "accelerator.device.type",
    "get_gpu_info": "`drivetrain env` shows the devices",
    "prepare_multi_gpu_env": _LAUNCH,
    "prepare_simple_launcher_cmd_env": _LAUNCH,
    "purge_accelerate_environment": "nothing is kept in environment variables; clear_environment empties them",
    "set_numa_affinity": _NUMACTL,
    # models
    "BnbQuantizationConfig": _QUANTIZED,
    "ParallelismConfig": _OTHER_AXES,
    "align_module_device": _BIG_MODELS,
    "cpu_offload": _BIG_MODELS,
    "cpu_offload_with_hook": _BIG_MODELS,
    "disk_offload": _BIG_MODELS,
    "dispatch_model": _BIG_MODELS,
    "get_balanced_memory": _BIG_MODELS,
    "get_max_memory": _BIG_MODELS,
    "infer_auto_device_map": _BIG_MODELS,
    "init_empty_weights": _EMPTY,
    "init_on_device": _EMPTY,
    "load_checkpoint_and_dispatch": _BIG_MODELS,
    "load_checkpoint_in_model": _BIG_MODELS,
    "TorchContextParallelConfig": _OTHER_AXES,
    "TorchTensorParallelConfig": _OTHER_AXES,
    "TorchTensorParallelPlugin": _OTHER_AXES,
    "compile_regions": _REGIONS,
    "ensure_weights_retied": _TIED,
    "find_tied_parameters": _TIED,
    "get_grad_scaler": "accelerator.scaler",
    "get_mixed_precision_context_manager": "accelerator.autocast()",
    "has_4bit_bnb_layers": _QUANTIZED,
    "has_compiled_regions": _REGIONS,
    "load_and_quantize_model": _QUANTIZED,
    "prepare_pippy": "torch.distributed.pipelining cuts a model into stages",
    "model_has_dtensor": "accelerator.run.capabilities.shards_params says whether parameters are cut",
    "recursive_getattr": "operator.attrgetter takes dotted names",
    "retie_parameters": _TIED,
    "OffloadedWeightsLoader": _BIG_MODELS,
    "check_device_map": _BIG_MODELS,
    "compute_module_sizes": _BIG_MODELS,
    "dtype_byte_size": "dtype.itemsize",
    "get_max_layer_size": _BIG_MODELS,
    "has_offloaded_params": _BIG_MODELS,
    "load_offloaded_weights": _BIG_MODELS,
    "load_state_dict": "safetensors.torch.load_file, or load for files of save",
    "named_module_tensors": "module.named_parameters() and module.named_buffers()",
    "offload_state_dict": _BIG_MODELS,
    "set_module_tensor_to_device": _BIG_MODELS,
    # the rest
    "get_pretty_name": "getattr(thing, '__qualname__', type(thing).__qualname__)",
    "is_peft_model": "isinstance(accelerator.unwrap_model(model), peft.PeftModel)",
    "rich": "rich's own traceback.install()",
    # libraries whose package is called otherwise than the question
    "is_4bit_bnb_available": "is_bitsandbytes_available()",
    "is_8bit_bnb_available": "is_bitsandbytes_available()",
    "is_bitsandbytes_multi_backend_available": "is_bitsandbytes_available()",
    "is_bnb_available": "is_bitsandbytes_available()",
    "is_lomo_available": "is_lomo_optim_available()",
    "is_pippy_available": "torch.distributed.pipelining is part of torch",
    "is_torchdata_stateful_dataloader_available": "every prepared loader keeps its position, with or without torchdata",
    "is_weights_only_available": "every torch that is supported has torch.load(weights_only=True)",
}

ATTRIBUTES: Mapping[str, str] = {
    # of an Accelerator
    "_custom_objects": "register_for_checkpointing keeps them for save_state and load_state",
    "_dataloaders": "accelerator.known.loaders",
    "_models": "accelerator.known.wrapped_models",
    "_optimizers": "accelerator.known.optimizers",
    "_schedulers": "accelerator.known.schedulers",
    "context_parallel_rank": _OTHER_AXES,
    "data_parallel_shard_rank": "accelerator.run.world.mesh has the axes of a backend that shards",
    "is_composable_parallelism_enabled": _OTHER_AXES,
    "lomo_backward": "not offered; such an optimizer updates in its own fused_backward, unprepared",
    "maybe_context_parallel": _OTHER_AXES,
    "native_amp": _PRECISION,
    "parallelism_config": _OTHER_AXES,
    "pipeline_parallel_rank": _OTHER_AXES,
    "rng_types": _ORDER,
    "tensor_parallel_rank": _OTHER_AXES,
    "torch_device_mesh": "accelerator.run.world.mesh",
    "use_fp16": _PRECISION,
    "verify_device_map": _BIG_MODELS,
    # of a state
    "_reset_state": "drivetrain.state.reset() takes the run down, and with it all states",
    "_shared_state": "drivetrain.state.current() is what all states view",
    "debug": "collectives are always compared over ranks first; check_collectives: false leaves that out",
    "default_device": "device",
    "dynamo_plugin": "config.compile",
    "fork_launched": "nothing depends on how processes were started",
    "plugin_kwargs": "num_steps, sync_with_dataloader and adjust_scheduler are attributes",
    "set_device": "the device is chosen and set when the run comes up; settings device and gpu_ids say which",
}
"""Attributes of objects, apart from handlers and from what is named like a plugin's keyword of ``Accelerator(...)``."""

KEYWORDS: Mapping[str, str] = {
    "fp16": "mixed_precision='fp16'",
    "logging_dir": "project_config=ProjectConfiguration(logging_dir=...)",
    "parallelism_config": _OTHER_AXES,
    "torch_tp_plugin": _OTHER_AXES,
}
"""Keywords of ``Accelerator(...)``."""


class KnownElsewhere:
    """Base of classes that scripts know from elsewhere: an attribute that is not here says what to use instead."""

    if not TYPE_CHECKING:  # type checkers are to find misspelt names

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property's own error, which led here
            from drivetrain import registry

            instead = _HANDLERS if name.endswith("_handler") else ATTRIBUTES.get(name)
            if instead is None and not name.startswith("_") and name in registry.keywords():
                instead = "accelerator.run.names has the plugins of the run, accelerator.handlers() what code gave them"
            hint = f"; use instead: {instead}" if instead else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)


def instead_of(name: str) -> str | None:
    """What to use in place of a name that is not here; None if nothing is known of it."""
    return INSTEAD.get(name)


def resolve(name: str) -> Any:
    """What a name of no index stands for: what a plugin exports, or the question ``is_NAME_available`` for any NAME.

    Raises:
        AttributeError: Nothing.
        ImportError: Nothing, and it is known what to use instead.
        PluginError: A plugin exports it, but can't be loaded, or two do.
    """
    from drivetrain import availability, registry

    question = re.fullmatch(r"is_(\w+)_available", name)
    if question and name not in INSTEAD and name not in registry.exports():
        return availability.checker(question[1])
    return registry.exported(name)
