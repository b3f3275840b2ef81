"""What delayed scaling has learnt: scales and the history of the largest values, in checkpoints without a pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn

from drivetrain.checkpoint.optimizer_names import plain_name
from drivetrain.errors import CheckpointError
from drivetrain.logging import get_logger
from drivetrain.world import Run

__all__ = ["collect", "put_back"]

logger = get_logger("drivetrain.fp8")

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_TENSORS = ("scale", "amax_history")


def collect(run: Run, models: Sequence[nn.Module]) -> dict[str, Any]:
    """By model and name of a layer; layers that have learnt nothing yet, or by another recipe, are left out."""
    found: dict[str, Any] = {}
    for index, model in enumerate(models):
        for name, layer in _layers(run, model):
            learnt = {
                f"{direction}.{tensor}": getattr(layer.fp8_meta[direction], tensor).detach().cpu()
                for direction in _DIRECTIONS
                for tensor in _TENSORS
                if _keeps(layer, direction)
            }
            if learnt:
                found[f"{index}.{name}"] = learnt
    return found


def _layers(run: Run, model: nn.Module) -> Iterator[tuple[str, Any]]:
    bare = run.hooks.unwrap(run=run, model=model)
    for name, module in bare.named_modules():
        if isinstance(module, te.Linear):
            yield plain_name(name), module


def _keeps(layer: Any, direction: str) -> bool:
    state = layer.fp8_meta.get(direction)
    return all(isinstance(getattr(state, tensor, None), Tensor) for tensor in _TENSORS)


@torch.no_grad()  # type: ignore[untyped-decorator]
def put_back(run: Run, models: Sequence[nn.Module], state: Mapping[str, Any], recipe: Any) -> None:
    """Load what :func:`collect` returned.

    Args:
        run: The run.
        models: All prepared ones.
        state: May be empty, if another precision or recipe saved it.
        recipe: The engine's.

    Raises:
        CheckpointError: It was learnt over another number of steps.
    """
    if not recipe.delayed():
        return
    missing = []
    for index, model in enumerate(models):
        for name, layer in _layers(run, model):
            learnt = state.get(f"{index}.{name}")
            if learnt is None:
                missing.append(name)
            else:
                _fill(name, layer, learnt, recipe)
    if missing:
        logger.warning(
            "the checkpoint has no scales for %d layers (%s, ...), which start to learn them anew",
            len(missing),
            missing[0],
        )


def _fill(name: str, layer: Any, learnt: Mapping[str, Tensor], recipe: Any) -> None:
    length = len(learnt["scaling_fwd.amax_history"])
    if length != recipe.amax_history_len:
        raise CheckpointError(
            f"the scales of {name} were learnt over {length} steps, and amax_history_len is {recipe.amax_history_len}; "
            f"set fp8-te.options.amax_history_len: {length}"
        )
    if not all(_keeps(layer, direction) for direction in _DIRECTIONS):
        # As the engine's own loading does before its first forward: make what there is to be filled.
        layer.fp8_meta["recipe"] = recipe
        layer.fp8_meta["num_gemms"] = 1
        layer.init_fp8_meta_tensors(recipe)
    for direction in _DIRECTIONS:
        for tensor in _TENSORS:
            held = getattr(layer.fp8_meta[direction], tensor)
            held.copy_(learnt[f"{direction}.{tensor}"])
