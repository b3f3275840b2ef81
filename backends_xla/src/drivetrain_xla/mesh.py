"""The devices as a mesh, and which axis of it cuts what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigError
from drivetrain_xla.config import AXES, MeshConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Partitions", "arrange", "axis_sizes", "is_cut", "mark"]

Spec = tuple[Any, ...]


def axis_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Devices along each axis.

    Args:
        config: What was asked for.
        devices: How many there are.

    Raises:
        ConfigError: The axes' product is not their number; the text lists what would fit.
    """
    others = config.fsdp * config.model
    data = devices // others if config.data is None else config.data
    if data * others != devices or data == 0:
        asked = f"{'the rest' if config.data is None else config.data} x {config.fsdp} x {config.model}"
        raise ConfigError(
            f"xla.mesh: data x fsdp x model = {asked} does not make {devices} device(s). With these, fsdp x model can "
            f"be one of {', '.join(map(str, _divisors(devices)))}, and data takes the rest when it is left out"
        )
    return dict(zip(AXES, (data, config.fsdp, config.model), strict=True))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def arrange(sizes: Mapping[str, int]) -> Any:
    """The engine's mesh of all devices, in the order in which the runtime numbers them."""
    import numpy as np
    import torch_xla.distributed.spmd as xs

    shape = tuple(sizes[axis] for axis in AXES)
    return xs.Mesh(np.arange(int(np.prod(shape))), shape, AXES)


def mark(tensor: Tensor, mesh: Any, spec: Spec) -> None:
    """Tell the compiler how a tensor is cut; one that was marked before is marked anew."""
    import torch_xla.distributed.spmd as xs

    if is_cut(tensor):
        xs.clear_sharding(tensor)
    xs.mark_sharding(tensor, mesh, spec)


def is_cut(tensor: Tensor) -> bool:
    """Whether a tensor has a mark."""
    import torch_xla

    return bool(torch_xla._XLAC._get_xla_sharding_spec(tensor))


class Partitions:
    """Which dimension of each parameter is cut along which axis.

    Args:
        patterns: Of names, with an axis or None for each dimension; the first that matches holds.
        sizes: Devices along each axis.
    """

    def __init__(self, patterns: Mapping[str, Sequence[str | None]], sizes: Mapping[str, int]) -> None:
        self._patterns = {re.compile(pattern): tuple(axes) for pattern, axes in patterns.items()}
        self._sizes = sizes
        self.unmatched = set(patterns)
        """Patterns that have matched no parameter of any model yet."""

    def of(self, model: nn.Module) -> Iterator[tuple[str, Tensor, Spec]]:
        """Name, parameter and cut of those parameters that are cut.

        Raises:
            ConfigError: A pattern gives another number of axes than the parameter has dimensions.
        """
        for name, parameter in model.named_parameters():
            found = next((pattern for pattern in self._patterns if pattern.fullmatch(name)), None)
            spec = self._by_pattern(name, parameter, found) if found else (None,) * parameter.ndim
            spec = self._with_fsdp(parameter, spec)
            if any(axis is not None for axis in spec):
                yield name, parameter, spec

    def _by_pattern(self, name: str, parameter: Tensor, pattern: re.Pattern[str]) -> Spec:
        self.unmatched.discard(pattern.pattern)
        axes = self._patterns[pattern]
        if len(axes) != parameter.ndim:
            raise ConfigError(
                f"xla.partition: {pattern.pattern!r} names {len(axes)} axes, and {name} has shape "
                f"{tuple(parameter.shape)}; name one, or null, for each dimension"
            )
        return axes

    def _with_fsdp(self, parameter: Tensor, spec: Spec) -> Spec:
        """Cut the longest dimension that is whole yet, so that padding is least."""
        if self._sizes["fsdp"] == 1 or "fsdp" in spec:
            return spec
        whole = [index for index, axis in enumerate(spec) if axis is None]
        if not whole:
            return spec
        longest = max(whole, key=lambda index: parameter.shape[index])
        return tuple("fsdp" if index == longest else axis for index, axis in enumerate(spec))
