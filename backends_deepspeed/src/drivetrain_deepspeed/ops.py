"""Operations that the engine compiles when they are first used: built beforehand, and locks that were left behind.

``python -m drivetrain_deepspeed.ops`` builds those the CPU needs, so that no training waits for a compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["FOR_THE_CPU", "built", "extensions_folder", "main", "stale_locks"]

FOR_THE_CPU = {"cpu_adam": "CPUAdamBuilder"}
"""Operations by the name of their folder, and the engine's builders: what offloading an Adam optimizer needs."""
_STALE_AFTER = 600.0
"""Seconds without any change in its folder after which a lock belongs to a build that was killed."""


def extensions_folder() -> Path:
    """Where torch keeps compiled extensions: ``$TORCH_EXTENSIONS_DIR``, else its cache."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def _locks() -> Iterator[Path]:
    folder = extensions_folder()
    yield from sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")})


def stale_locks(seconds: float = _STALE_AFTER) -> list[Path]:
    """Locks of builds that were killed. Whatever needs that operation waits for them for ever, without a word.

    Args:
        seconds: A lock counts once nothing in its folder has changed for so long.
    """
    return [lock for lock in _locks() if time.time() - _last_change(lock.parent) > seconds]


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def built() -> list[str]:
    """Names of the operations for the CPU that are compiled already."""
    folder = extensions_folder()
    return [name for name in FOR_THE_CPU if any(folder.glob(f"**/{name}/{name}.so"))]


def compiler() -> str | None:
    """Path of the C++ compiler; None without one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


_BUILD = (
    "import sys; from deepspeed.accelerator import get_accelerator; "
    "get_accelerator().create_op_builder(sys.argv[1]).load(verbose=False)"
)


def main(timeout: float = 900.0) -> int:
    """Build what is missing, after removing stale locks.

    Args:
        timeout: Seconds that one operation may take. Its lock is removed if it doesn't finish.

    Returns:
        An exit code.
    """
    for lock in stale_locks(60.0):
        print(f"removing {lock}, left by a build that was killed")
        lock.unlink()
    missing = [name for name in FOR_THE_CPU if name not in built()]
    if missing and compiler() is None:
        print(f"no C++ compiler, so {', '.join(missing)} can't be built; optimizers stay torch's own when offloaded")
        return 0
    for name in missing:
        print(f"building {name} in {extensions_folder()} (minutes)", flush=True)
        command = [sys.executable, "-c", _BUILD, FOR_THE_CPU[name]]
        try:
            code = subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            code = 1
            print(f"{name} was not built in {timeout:g} s", file=sys.stderr)
            for lock in _locks():
                if lock.parent.name == name:
                    lock.unlink()
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
