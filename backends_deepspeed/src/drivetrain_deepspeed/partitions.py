"""What this rank holds of a parameter under ZeRO: its master weights, reduced gradient and optimizer state.

The engine flattens each group of parameters and gives every rank a part of the flat tensor. Stages 1 and 2 cut across
parameters, stage 3 cuts each one; here both look alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.pieces import Piece, piece_of

__all__ = [
    "Slot",
    "clear_gradients",
    "clear_kept",
    "gradients",
    "held",
    "locate",
    "loss_scale",
    "slot",
    "update_gradients",
    "update_parameters",
]


@attrs.frozen(eq=False)
class Slot:
    """A rank's part of a parameter in the engine's flat memory."""

    flat: Tensor
    """Master weights of the group, or of the part of it that is updated at once, that this rank holds."""
    offset: int
    """Position of the part in it."""
    start: int
    """Position of the part's first element in the flattened parameter."""
    numel: int
    """Elements; may be none."""
    shape: tuple[int, ...]
    """Of the whole parameter."""

    def cut(self, flat: Tensor) -> Tensor:
        """The part in ``flat``, which is laid out like the master weights; written through."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)


def slot(zero: Any, parameter: Tensor) -> Slot | None:
    """Where the engine's optimizer keeps a parameter; None if it does not train it.

    Args:
        zero: The optimizer of an engine, ``engine.optimizer``.
        parameter: Of its module.
    """
    if hasattr(parameter, "ds_id"):
        return _slot_of_cut(zero, parameter)
    if not hasattr(parameter, "_hp_mapping"):
        return None
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping
    flats = _flats(zero)
    if mapping is None:
        return Slot(flats[0], 0, 0, 0, shape)
    address, part = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Slot(flats[mapping.param_group_index], address.start, part.start, part.numel, shape)


def _flats(zero: Any) -> list[Tensor]:
    """Flat master weights at stages 1 and 2, one for each group; the engine's bf16 optimizer has a name of its own."""
    found = getattr(zero, "single_partition_of_fp32_groups", None)
    return zero.fp32_groups_flat_partition if found is None else found


def _slot_of_cut(zero: Any, parameter: Any) -> Slot | None:
    positions = getattr(zero, "grad_position", {})
    key = zero.get_param_id(parameter) if positions else None
    if key not in positions:
        return None
    group, offset, _ = positions[key]
    start, numel = _own_range(parameter)
    return Slot(zero.fp32_partitioned_groups_flat[group], offset, start, numel, tuple(parameter.ds_shape))


def _own_range(parameter: Any) -> tuple[int, int]:
    """Position and number of the elements that this rank holds of a parameter cut by stage 3, padding left out."""
    size = parameter.partition_numel()
    start = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel) - start


def locate(zero: Any, tensor: Tensor) -> Piece:
    """What this rank holds of a parameter or buffer: of the master weights where there are any."""
    found = slot(zero, tensor)
    if found is not None:
        return Piece(found.cut(found.flat), found.start, found.shape)
    return held(tensor)


def held(tensor: Any) -> Piece:
    """What this rank holds of a parameter or buffer that is not trained."""
    if not hasattr(tensor, "ds_id"):
        return piece_of(tensor)
    start, numel = _own_range(tensor)
    return Piece(tensor.ds_tensor.detach().view(-1).narrow(0, 0, numel), start, tuple(tensor.ds_shape))


# --------------------------------------------------------------------------------------------------------- gradients


def loss_scale(zero: Any) -> float:
    """What the engine multiplied the losses by."""
    return float(getattr(zero, "loss_scale", 1.0))  # its bf16 optimizer has none


def gradients(zero: Any, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of reduced gradients, multiplied by the loss scale if there is one. Not to be written."""
    return [gradient for _, gradient in _gradients(zero, parameters) if gradient.numel()]


def _gradients(zero: Any, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[Any, Tensor]]:
    for parameter in parameters:
        found = slot(zero, parameter)
        if found is None or not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            yield parameter, zero.get_local_fp32_grad_for_param(parameter)
        elif found.numel:
            yield parameter, _gradient_at_stage_2(parameter, found)


def _gradient_at_stage_2(parameter: Any, found: Slot) -> Tensor:
    whole = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
    # Some of the engine's optimizers keep the gradient of the whole parameter, others of this rank's part.
    return whole if whole.numel() == found.numel else whole.narrow(0, found.start, found.numel)


def update_gradients(zero: Any, parameters: Iterable[nn.Parameter], change: Callable[[Tensor], Any]) -> None:
    """Change this rank's parts of reduced gradients.

    Args:
        zero: The optimizer of an engine.
        parameters: Of its module.
        change: Called with each part, which it changes in place.
    """
    for parameter, gradient in _gradients(zero, parameters):
        change(gradient)
        if hasattr(parameter, "ds_id"):
            zero.set_local_grad_for_param(gradient, parameter)  # what it handed out may have been a copy


def clear_gradients(zero: Any) -> None:
    """Forget reduced gradients that no update will use."""
    zero.zero_grad()
    if hasattr(zero, "clear_hp_grads"):  # the engine's bf16 optimizer keeps all of them in buffers of its own
        return
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(zero, name, {}):
            getattr(zero, name)[group] = None
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.micro_step_id = -1
        zero._offload_accumulated_param_ids = set()
    if _offloaded(zero):
        zero.reset_cpu_buffers()
    clear_kept(zero)


def clear_kept(zero: Any) -> None:
    """Clear the buffers of gradients that outlive an update.

    The engine only overwrites them, so a parameter that is not used in an update would be moved by its last gradient.
    """
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    if flat is not None:
        flat.zero_()
    if _offloaded(zero):
        for buffer in getattr(zero, "accumulated_grads_in_cpu", {}).values():
            buffer.zero_()
        for master in _masters(zero):
            if master.grad is not None:
                master.grad.zero_()


def _offloaded(zero: Any) -> bool:
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


def _masters(zero: Any) -> list[Tensor]:
    cut = getattr(zero, "fp32_partitioned_groups_flat", None)
    return _flats(zero) if cut is None else cut


# ----------------------------------------------------------------------------------------------------------- parameters


@torch.no_grad()  # type: ignore[untyped-decorator]
def update_parameters(zero: Any) -> None:
    """Give parameters the values of the master weights, after these were written. Every rank calls it."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        return
    groups = getattr(zero, "fp32_partitioned_groups_flat", ())
    for number, master in enumerate(groups):
        flat = zero.fp16_partitioned_groups_flat[number]
        if flat is None or not math.prod(master.shape):
            continue
        flat.data.copy_(master.data)
        parts = zero.unflatten(flat, zero.fp16_partitioned_groups[number])
        for part, values in zip(zero.fp16_partitioned_groups[number], parts, strict=True):
            part.data = values.data
    refresh_kept(getattr(zero, "persistent_parameters", ()))


def refresh_kept(kept: Any) -> None:
    """Make the parameters that stage 3 keeps whole equal to the parts that ranks hold of them."""
    if len(kept):
        kept[0].partition(kept, has_been_updated=False)
        kept[0].all_gather(kept)
