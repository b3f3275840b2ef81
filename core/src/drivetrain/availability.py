"""What scripts ask before they use something: is it there?

Answered for any name, instead of from a list of names: a plugin of somebody else's is as good as one of ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

__all__ = ["checker", "is_available"]


def checker(name: str) -> Callable[[], bool]:
    """The function ``is_NAME_available`` for a name."""

    def check() -> bool:
        return is_available(name)

    check.__name__ = check.__qualname__ = f"is_{name}_available"
    check.__doc__ = f"Whether {name} can be used here; see :func:`drivetrain.availability.is_available`."
    return check


def is_available(name: str) -> bool:
    """Whether a device of this type, a plugin or family of precisions of this name, or such a library is there.

    Args:
        name: A torch device type, for which torch must report a usable device; else the name of an installed plugin;
            else that of a module, which is not imported.
    """
    module = _device_module(name)
    if module is not None:
        return _is_usable(name, module)
    return _is_plugin(name) or _is_importable(name)


def _device_module(name: str) -> Any:
    """Torch's module of a device type; None if it is no device type."""
    import torch

    try:
        return torch.get_device_module(torch.device(name))
    except (RuntimeError, ValueError):  # torch knows no such type, or nothing about it in this build
        return None


def _is_usable(name: str, module: Any) -> bool:
    import torch

    if hasattr(module, "is_available"):
        return bool(module.is_available())
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and current.type == name


def _is_plugin(name: str) -> bool:
    from drivetrain import registry

    if any(name in names for names in registry.entries().values()):
        return True
    return any(found.family == name for found in registry.load_all("precision")[0].values())


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
