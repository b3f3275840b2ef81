"""The state of a model that is cut over ranks: made whole, put back, and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from drivetrain.checkpoint.optimizer_names import plain_name
from drivetrain.errors import CheckpointError
from drivetrain.world import Run
from drivetrain_backends.pieces import Layout, Piece, gather, survey

__all__ = ["Contents", "by_all_names", "contents", "fill", "full", "listed", "misfits", "names_of"]

Locate = Callable[[Tensor], Piece]


@attrs.frozen(eq=False)
class Contents:
    """What a model's state dict has in it, by its names."""

    pieces: dict[str, Piece] = attrs.field(factory=dict)
    """Parameters and buffers, tied ones once."""
    aliases: dict[str, str] = attrs.field(factory=dict)
    """For every other name of a tied one the name it is under in ``pieces``."""
    extra: dict[str, nn.Module] = attrs.field(factory=dict)
    """Modules with state of another kind (``get_extra_state``)."""
    order: list[str] = attrs.field(factory=list)
    """All names, as a state dict has them."""


def contents(module: nn.Module, locate: Locate) -> Contents:
    """What is in a module's state.

    Args:
        module: The user's.
        locate: Gives the piece this rank holds of a tensor.
    """
    found = Contents()
    first: dict[int, str] = {}
    for name, tensor in _tensors(module):
        found.order.append(name)
        if id(tensor) in first:
            found.aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            found.pieces[name] = locate(tensor)
    for prefix, inner in module.named_modules(remove_duplicate=False):
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            found.extra[_joined(prefix, "_extra_state")] = inner
    found.order.extend(found.extra)
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is not None and name not in inner._non_persistent_buffers_set:
                yield _joined(prefix, name), tensor


def _joined(prefix: str, name: str) -> str:
    return plain_name(f"{prefix}.{name}" if prefix else name)


def full(run: Run, module: nn.Module, locate: Locate, group: Any) -> dict[str, Any]:
    """The whole state dict, on the CPU of rank 0; empty on other ranks. Every rank calls it."""
    found = contents(module, locate)
    wholes: dict[str, Any] = dict(gather(run, found.pieces, survey(run, found.pieces), group))
    if run.world.rank != 0:
        return {}
    wholes |= {alias: wholes[name] for alias, name in found.aliases.items()}
    wholes |= {name: inner.get_extra_state() for name, inner in found.extra.items()}
    return {name: wholes[name] for name in found.order}


def fill(module: nn.Module, locate: Locate, state: Mapping[str, Any], strict: bool) -> None:
    """Put a whole state dict into a module of which this rank holds pieces. Only these are read.

    Raises:
        CheckpointError: It does not fit. Nothing was changed then.
    """
    found = contents(module, locate)
    given = {plain_name(name): name for name in state}
    shapes = {name: tuple(state[key].shape) for name, key in given.items() if isinstance(state[key], Tensor)}
    problems = misfits(found, shapes, {name for name in given if name not in shapes}, strict)
    if problems:
        raise CheckpointError(f"this state does not fit the model: {listed(problems)}")
    for name, piece in found.pieces.items():
        key = next((given[one] for one in names_of(found, name) if one in given), None)
        if key is not None:
            piece.write(state[key].detach().reshape(-1)[piece.start : piece.stop], piece.start)
    for name, inner in found.extra.items():
        if name in given:
            inner.set_extra_state(state[given[name]])


def names_of(found: Contents, name: str) -> list[str]:
    return [name, *(alias for alias, kept in found.aliases.items() if kept == name)]


def misfits(found: Contents, shapes: Mapping[str, tuple[int, ...]], others: set[str], strict: bool) -> list[str]:
    """What keeps a state from being loaded into a model.

    Args:
        found: What the model has.
        shapes: Of the tensors in the state, by all their names.
        others: Names of what else is in it.
        strict: Whether both must have the same names.
    """
    expected = {
        name: found.pieces[found.aliases.get(name, name)].shape for name in found.order if name not in found.extra
    }
    problems = [
        f"{name} is of shape {shapes[name]} there, and {shape} here"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if strict:
        given = {*shapes, *others}
        problems += [f"{name} was not saved" for name in found.order if name not in given]
        problems += [f"{name} was saved, but the model has no such entry" for name in sorted(given - set(found.order))]
    return problems


def listed(problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more


def by_all_names(layouts: Mapping[str, Layout], aliases: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes of saved tensors by all their names."""
    shapes = {name: layout.shape for name, layout in layouts.items()}
    return {**shapes, **{alias: shapes[name] for alias, name in aliases.items()}}
