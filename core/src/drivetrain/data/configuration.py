"""How loaders are prepared, as settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from drivetrain.validators import of_type

__all__ = ["DataLoaderConfiguration"]

_boolean = of_type(bool)


def _callable_or_none(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{attribute.name} must be a function or None; got {value!r}")


@attrs.define
class DataLoaderConfiguration:
    """How ``prepare`` shares a loader's data out over the data-parallel ranks.

    Attributes:
        split_batches: Whether the loader's batch size is that of all ranks together: each batch is cut into equal
            parts. If not, it is that of one rank, and ranks take whole batches in turn.
        dispatch_batches: Whether rank 0 reads the data and sends the other ranks their part. None: only for streams
            (``IterableDataset``) that don't shard themselves.
        even_batches: Whether an incomplete last round is completed with the first samples of the epoch, so that all
            ranks get the same number of batches of the same size. Metrics never see the repeated samples.
        use_seedable_sampler: Accepted for scripts that pass it: the order is always a function of seed and epoch.
        data_seed: Seed of the order. None: the seed of the generator the loader was given, else one of the run's own.
        non_blocking: Whether copies to the device may overlap with what follows; needs ``pin_memory`` on the loader.
        use_stateful_dataloader: Accepted for scripts that pass it: every prepared loader has ``state_dict`` and
            ``load_state_dict``, and ``save_state`` saves its position. Torchdata's own loader may be prepared too.
        already_sharded: The loader reads this rank's share only; it is placed and counted, but not sharded again.
        slice_fn_for_dispatch: What cuts a round of a dispatched loader into the ranks' parts, where rows are not along
            the first dimension: ``f(data, slice, process_index=..., num_processes=...)``, called on the reading rank
            for each rank. Rounds are not completed then, and metrics keep all rows.
    """

    split_batches: bool = attrs.field(default=False, validator=_boolean)
    dispatch_batches: bool | None = attrs.field(default=None, validator=of_type(bool, optional=True))
    even_batches: bool = attrs.field(default=True, validator=_boolean)
    use_seedable_sampler: bool = attrs.field(default=True, validator=_boolean)
    data_seed: int | None = attrs.field(default=None, validator=of_type(int, optional=True))
    non_blocking: bool = attrs.field(default=False, validator=_boolean)
    use_stateful_dataloader: bool = attrs.field(default=False, validator=_boolean)
    already_sharded: bool = attrs.field(default=False, validator=_boolean, kw_only=True)
    slice_fn_for_dispatch: Callable[..., Any] | None = attrs.field(
        default=None, validator=_callable_or_none, kw_only=True
    )

    def __attrs_post_init__(self) -> None:
        if self.already_sharded and self.dispatch_batches:
            raise ValueError(
                "already_sharded=True says that every rank reads its own share, dispatch_batches=True that rank 0 "
                "reads for all; leave one of them out"
            )
        if self.slice_fn_for_dispatch is not None and self.dispatch_batches is False:
            raise ValueError("slice_fn_for_dispatch has no effect with dispatch_batches=False; leave one of them out")
