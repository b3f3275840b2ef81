"""An index of names under the place where existing scripts look for them. Nothing is defined here.

Every name lives in the module ``_PUBLIC`` says, and is resolved when it is first used; importing this package costs
nothing. Names that plugins export, such as the handlers of a backend, are found too, and so is ``is_NAME_available``
for any name.
"""

from __future__ import annotations

from typing import Any

_PUBLIC = {
    "AutocastKwargs": "drivetrain.handlers",
    "DataLoaderConfiguration": "drivetrain.data.configuration",
    "DistributedType": "drivetrain.distributed_type",
    "GradScalerKwargs": "drivetrain.handlers",
    "GradientAccumulationPlugin": "drivetrain.accumulation",
    "KwargsHandler": "drivetrain.plugin",
    "ProfileKwargs": "drivetrain.profiling",
    "ProjectConfiguration": "drivetrain.checkpoint",
    "TorchDynamoPlugin": "drivetrain.handlers",
    "broadcast": "drivetrain.operations",
    "broadcast_object_list": "drivetrain.operations",
    "clear_device_cache": "drivetrain.memory",
    "clear_environment": "drivetrain.environment",
    "compare_versions": "drivetrain.versions",
    "concatenate": "drivetrain.nested",
    "convert_dict_to_env_variables": "drivetrain.environment",
    "convert_to_fp32": "drivetrain.nested",
    "extract_model_from_parallel": "drivetrain.operations",
    "find_batch_size": "drivetrain.nested",
    "find_device": "drivetrain.nested",
    "find_executable_batch_size": "drivetrain.memory",
    "gather": "drivetrain.operations",
    "gather_object": "drivetrain.operations",
    "get_int_from_env": "drivetrain.environment",
    "honor_type": "drivetrain.nested",
    "is_bf16_available": "drivetrain.operations",
    "is_compiled_module": "drivetrain.unwrapping",
    "is_namedtuple": "drivetrain.nested",
    "is_port_in_use": "drivetrain.launch.ports",
    "is_torch_tensor": "drivetrain.nested",
    "is_torch_version": "drivetrain.versions",
    "listify": "drivetrain.nested",
    "load": "drivetrain.checkpoint.objects",
    "merge_dicts": "drivetrain.nested",
    "pad_across_processes": "drivetrain.operations",
    "parse_choice_from_env": "drivetrain.environment",
    "parse_flag_from_env": "drivetrain.environment",
    "patch_environment": "drivetrain.environment",
    "recursively_apply": "drivetrain.nested",
    "reduce": "drivetrain.operations",
    "release_memory": "drivetrain.memory",
    "save": "drivetrain.checkpoint.objects",
    "send_to_device": "drivetrain.nested",
    "set_seed": "drivetrain.seeding",
    "slice_tensors": "drivetrain.nested",
    "str_to_bool": "drivetrain.environment",
    "synchronize_rng_state": "drivetrain.seeding",
    "synchronize_rng_states": "drivetrain.seeding",
    "tqdm": "drivetrain.progress_bar",
    "wait_for_everyone": "drivetrain.operations",
    "write_basic_config": "drivetrain.config.template",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = import_module("drivetrain.elsewhere").resolve(name)
        except AttributeError as error:
            raise AttributeError(str(error).replace("'drivetrain'", repr(__name__), 1)) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
