"""An index of names under the place where existing scripts look for them. Nothing is defined here.

Every name lives in the module ``_PUBLIC`` says, and is resolved when it is first used; importing this package costs
nothing. Names that plugins export, such as the handlers of a backend, are found too.
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
    "broadcast": "drivetrain.operations",
    "broadcast_object_list": "drivetrain.operations",
    "clear_device_cache": "drivetrain.memory",
    "clear_environment": "drivetrain.environment",
    "concatenate": "drivetrain.nested",
    "convert_to_fp32": "drivetrain.nested",
    "extract_model_from_parallel": "drivetrain.operations",
    "find_batch_size": "drivetrain.nested",
    "find_device": "drivetrain.nested",
    "find_executable_batch_size": "drivetrain.memory",
    "gather": "drivetrain.operations",
    "gather_object": "drivetrain.operations",
    "honor_type": "drivetrain.nested",
    "is_bf16_available": "drivetrain.operations",
    "listify": "drivetrain.nested",
    "pad_across_processes": "drivetrain.operations",
    "parse_flag_from_env": "drivetrain.environment",
    "patch_environment": "drivetrain.environment",
    "recursively_apply": "drivetrain.nested",
    "reduce": "drivetrain.operations",
    "release_memory": "drivetrain.memory",
    "send_to_device": "drivetrain.nested",
    "set_seed": "drivetrain.seeding",
    "slice_tensors": "drivetrain.nested",
    "str_to_bool": "drivetrain.environment",
    "synchronize_rng_state": "drivetrain.seeding",
    "synchronize_rng_states": "drivetrain.seeding",
    "tqdm": "drivetrain.progress_bar",
    "wait_for_everyone": "drivetrain.operations",
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
            value = import_module("drivetrain.registry").exported(name)
        except AttributeError as error:
            raise AttributeError(str(error).replace("'drivetrain'", repr(__name__), 1)) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
