"""A progress bar that is shown once, not once a process."""

from __future__ import annotations

from typing import Any

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm`` that only the first process of each machine shows.

    Args:
        *args: For tqdm, first of all what is iterated.
        main_process_only: Whether the others show nothing.
        **kwargs: For tqdm. ``disable`` hides the bar on every process.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("a progress bar needs the package tqdm: pip install tqdm") from error
    from drivetrain.state import PartialState

    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
