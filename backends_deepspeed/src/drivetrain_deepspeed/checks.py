"""Rows for ``drivetrain doctor``."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.plugin import Check
from drivetrain.requirements import installed_version, unmet
from drivetrain_deepspeed import ops

__all__ = ["engine"]


def engine(requires: tuple[str, ...]) -> Iterator[Check]:
    """Whether the engine is there, imports, and has what it needs to compile its operations.

    Args:
        requires: What the backend requires.
    """
    version = installed_version("deepspeed")
    wrong = [text for text in unmet(requires) if "deepspeed" in text]
    if version is None or wrong:
        fix = 'pip install "drivetrain[deepspeed]" (build it in the environment of torch: --no-build-isolation)'
        yield Check("deepspeed", False, "not installed" if version is None else "; ".join(wrong), fix)
        return
    yield _import(version)
    compiler = ops.compiler()
    yield Check(
        "C++ compiler", compiler is not None, compiler or "none found", "" if compiler else "install g++, or set CXX"
    )
    yield from _operations()
    yield _float16()


def _import(version: str) -> Check:
    try:
        import deepspeed  # noqa: F401
    except Exception as error:  # whatever its many parts raise is a finding here
        return Check(
            "deepspeed",
            False,
            f"{version}; importing it raised {type(error).__name__}: {error}",
            "reinstall it in the environment of torch: --no-build-isolation",
        )
    from deepspeed.accelerator import get_accelerator

    return Check("deepspeed", True, f"{version}, for {get_accelerator().device_name()} devices")


def _operations() -> Iterator[Check]:
    folder = ops.extensions_folder()
    stale = ops.stale_locks()
    yield Check(
        "locks in the folder of compiled operations",
        not stale,
        f"left by a build that was killed: {', '.join(map(str, stale))}; whatever needs that operation waits for ever"
        if stale
        else str(folder),
        f"remove: {' '.join(map(str, stale))}" if stale else "",
    )
    there = ops.built()
    missing = [name for name in ops.FOR_THE_CPU if name not in there]
    yield Check(
        "operations compiled for the CPU",
        True if not missing else None,
        f"{', '.join(there) or 'none'} in {folder}"
        + (f"; not yet: {', '.join(missing)}, which are compiled when first used (minutes)" if missing else ""),
        "python -m drivetrain_deepspeed.ops" if missing else "",
    )


def _float16() -> Check:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.is_fp16_supported():
        return Check("fp16", True, f"on {accelerator.device_name()}")
    return Check("fp16", None, f"the engine has no float16 on {accelerator.device_name()} here: use bf16")
