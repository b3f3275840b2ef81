"""Whether the installed torch and torch_xla are a pair, told before either is imported.

torch_xla is compiled against one minor version of torch and fails to load with any other, by an undefined symbol. Its
wheel does not name that version.
"""

from __future__ import annotations

from drivetrain.errors import EngineError
from drivetrain.requirements import installed_version

__all__ = ["check_pair", "mismatch"]


def mismatch() -> tuple[str, str] | None:
    """What is wrong with the pair, and the cure; None if nothing is."""
    from packaging.version import Version

    engine, torch = installed_version("torch_xla"), installed_version("torch")
    if engine is None:
        return "torch_xla is not installed", 'pip install "drivetrain[xla]", which brings the pair'
    if torch is None:
        return f"torch is not installed, and torch_xla is {engine}", f"pip install 'torch=={_minor(engine)}.*'"
    if Version(engine).release[:2] == Version(torch).release[:2]:
        return None
    return (
        f"torch_xla {engine} works with torch {_minor(engine)} only, and torch is {torch}",
        f"pip install 'torch_xla=={_minor(engine)}.*' 'torch=={_minor(engine)}.*', or the pair of another version, in "
        f"an environment of its own",
    )


def check_pair() -> None:
    """Refuse a pair that can't be loaded.

    Raises:
        EngineError: The two do not fit, or one is missing.
    """
    found = mismatch()
    if found is not None:
        wrong, cure = found
        raise EngineError(f"backend xla: {wrong}. {cure}")


def _minor(version: str) -> str:
    from packaging.version import Version

    return ".".join(map(str, Version(version).release[:2]))
