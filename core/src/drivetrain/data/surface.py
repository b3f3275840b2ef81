"""What an Accelerator says and does about loaders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from drivetrain.data.configuration import DataLoaderConfiguration

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LoadersMixin"]


class LoadersMixin:
    """How loaders are sharded, and loops over uneven data."""

    dataloader_config: DataLoaderConfiguration

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that leaves out the first batches of its next pass, and is like ``dataloader`` in all else."""
        from drivetrain.data.skipping import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def join_uneven_inputs(
        self, joinables: nn.Module | Sequence[nn.Module], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Context for a training loop in which ranks may run out of batches at different times.

        Ranks that are out of batches answer the others' gradient reductions until all are done; no other collective may
        stand in the loop. All ranks leave the context with the same weights, optimizers and schedulers.

        Args:
            joinables: The prepared models that are trained in the loop, or the one.
            even_batches: Overrides ``even_batches`` of all prepared loaders while the context lasts; None leaves it. If
                it is on, every rank has as many batches as the others, and there is nothing to join.

        Raises:
            DrivetrainError: The backend can't do that, gradients are accumulated, or a model is the one given to
                ``prepare``, not the one it returned.
            TypeError: Something is no model.
        """
        from drivetrain.uneven import join_uneven_inputs

        return join_uneven_inputs(self, joinables, even_batches)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _slicing_by(self, slice_fn_for_dispatch: Callable[..., Any] | None) -> Iterator[None]:
        """Context in which loaders are prepared with that function; None changes nothing."""
        before = self.dataloader_config
        if slice_fn_for_dispatch is not None:
            self.dataloader_config = attrs.evolve(before, slice_fn_for_dispatch=slice_fn_for_dispatch)
        try:
            yield
        finally:
            self.dataloader_config = before

    @property
    def even_batches(self) -> bool:
        """Whether short last rounds are completed so that all ranks have as many batches; of loaders to come."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.dataloader_config = attrs.evolve(self.dataloader_config, even_batches=even)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one, divided among the shards."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; None: for streams that do not shard themselves."""
        return self.dataloader_config.dispatch_batches

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device may overlap with what follows."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As given; every prepared loader keeps its position."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def use_seedable_sampler(self) -> bool:
        """As given; the order is always a function of seed and epoch."""
        return self.dataloader_config.use_seedable_sampler
