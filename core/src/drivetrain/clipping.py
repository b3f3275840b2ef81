"""What a backend's clipping offers, asked before it is called: what it lacks is then the same error on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.world import Run

__all__ = ["check_clipping"]


def check_clipping(run: Run, models: Iterable[nn.Module], parameters: Sequence[Tensor], norm_type: float) -> None:
    """Refuse a norm, or a part of a model, that the backend can't clip by its own account.

    Args:
        run: The run.
        models: All prepared models.
        parameters: What is to be clipped.
        norm_type: p of the p-norm.

    Raises:
        DrivetrainError: Its capabilities say that it can't.
    """
    capabilities = run.capabilities
    if capabilities.clip_norms is not None and norm_type not in capabilities.clip_norms:
        offered = ", ".join(str(norm) for norm in sorted(capabilities.clip_norms))
        raise DrivetrainError(
            f"backend {run.names['backend']!r} can't clip by the {norm_type}-norm; it offers: {offered}"
        )
    if not capabilities.clip_subsets:
        wanted = {id(parameter) for parameter in parameters}
        for model in models:
            _check_whole(run, model, wanted)


def _check_whole(run: Run, model: nn.Module, wanted: set[int]) -> None:
    bare: nn.Module = run.hooks.unwrap(run=run, model=model)
    trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
    given = sum(id(parameter) in wanted for parameter in trained)
    if 0 < given < len(trained):
        raise DrivetrainError(
            f"backend {run.names['backend']!r} clips the gradients of whole models only, but clip_grad_norm_ was given "
            f"{given} of the {len(trained)} trainable parameters of a {type(bare).__name__}; give it all of "
            f"model.parameters()"
        )
