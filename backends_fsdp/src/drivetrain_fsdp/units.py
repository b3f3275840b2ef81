"""Which modules are gathered as units of their own, and which parameters are left whole.

Everything is decided from names, classes, shapes and dtypes, so it is the same on every rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

import attrs
import torch
from torch import nn

from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.logging import get_logger
from drivetrain_fsdp.config import ShardingConfig

__all__ = ["Plan", "make_plan"]

logger = get_logger("drivetrain.fsdp")

_LARGE = 100_000_000
"""Parameters of a unit where neither the user nor the model says more."""


@attrs.frozen(eq=False)
class Plan:
    """What becomes of a model's modules and parameters. The model itself is the last unit, and not listed."""

    model: nn.Module
    units: tuple[nn.Module, ...]
    """Inner ones first."""
    recomputed: tuple[nn.Module, ...]
    """Modules whose activations are computed again in backward."""
    ignored: tuple[nn.Module, ...]
    """Modules that stay whole, those inside them not listed."""
    whole: Set[str]
    """Names of the parameters that stay whole: of ignored modules, and scalars and empty ones, which can't be cut."""

    def members(self, unit: nn.Module) -> Iterator[nn.Module]:
        """The modules whose tensors belong to a unit: those inside it, but not inside another one, nor ignored."""
        outside = {id(module) for module in (*self.units, *self.ignored)} - {id(unit)}
        waiting = [unit]
        seen: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen or id(module) in outside:
                continue
            seen.add(id(module))
            yield module
            waiting.extend(module.children())

    def wholes(self) -> Iterator[nn.Module]:
        """The modules that hold tensors which stay whole."""
        yield from {id(module): module for outer in self.ignored for module in outer.modules()}.values()
        for name in sorted(self.whole):
            yield self.model.get_submodule(name.rpartition(".")[0])

    def whole_parameters(self) -> list[nn.Parameter]:
        """The parameters that stay whole, as they are now."""
        return [parameter for name, parameter in self.model.named_parameters() if name in self.whole]


def make_plan(section: str, model: nn.Module, config: ShardingConfig, frozen_counts: bool) -> Plan:
    """Decide for a model.

    Args:
        section: Of the configuration, for messages.
        model: On any device, also without values.
        config: The section.
        frozen_counts: Whether all parameters of a unit must be of one dtype, or only those that are trained.

    Raises:
        ConfigError: A setting matches nothing in this model.
        DrivetrainError: A module holds parameters of two dtypes, which can't be in one unit.
    """
    ignored = _ignored(section, model, config.ignored_modules)
    inside_ignored = {id(module) for outer in ignored for module in outer.modules()}
    kept = {id(p) for outer in ignored for p in outer.parameters()}
    whole = {
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if id(p) in kept or p.dim() == 0 or p.numel() == 0
    }
    wholes = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in whole}
    chosen = [
        module
        for module in _chosen(section, model, config)
        if module is not model and id(module) not in inside_ignored and _own(module, wholes)
    ]
    if config.activation_checkpointing and not chosen:
        raise ConfigError(
            f"{section}.activation_checkpointing works on the units that wrap_policy chooses, and it chose none in "
            f"{_name(model)}; name them: {section}.transformer_classes"
        )
    units = [module for module in chosen if not _shares_with_outside(model, module, wholes)]
    units += _apart_by_dtype(model, units, wholes, frozen_counts)
    order = {id(module): position for position, module in enumerate(model.modules())}
    units.sort(key=lambda module: -order[id(module)])
    return Plan(
        model=model,
        units=tuple(units),
        recomputed=tuple(_outermost(chosen)) if config.activation_checkpointing else (),
        ignored=tuple(ignored),
        whole=frozenset(whole),
    )


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _own(module: nn.Module, wholes: Set[int]) -> bool:
    """Whether there is anything to be cut in a module."""
    return any(id(parameter) not in wholes for parameter in module.parameters())


def _outermost(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    inner = {id(inside) for module in modules for inside in module.modules() if inside is not module}
    return (module for module in modules if id(module) not in inner)


def _classes(model: nn.Module) -> str:
    return ", ".join(sorted({_name(module) for module in model.modules()}))


# ------------------------------------------------------------------------------------------------------- ignored ones


def _ignored(section: str, model: nn.Module, wanted: Any) -> list[nn.Module]:
    if wanted is None:
        return []
    named = dict(model.named_modules())
    if isinstance(wanted, str):
        found = [module for name, module in named.items() if re.fullmatch(wanted, name)]
        if not found:
            raise ConfigError(
                f"{section}.ignored_modules: {wanted!r} matches no module of {_name(model)} in full. Its modules: "
                f"{_some(named)}"
            )
    else:
        found = [named.get(item) if isinstance(item, str) else item for item in wanted]
        present = {id(module) for module in named.values()}
        missing = [item for item, module in zip(wanted, found, strict=True) if id(module) not in present]
        if missing:
            listed = ", ".join(repr(item) if isinstance(item, str) else f"a {_name(item)}" for item in missing)
            raise ConfigError(
                f"{section}.ignored_modules: {listed} is no module of {_name(model)}. Its modules: {_some(named)}"
            )
    if any(module is model for module in found):
        raise ConfigError(
            f"{section}.ignored_modules names the whole {_name(model)}, so there is nothing left to be cut"
        )
    return list(_outermost(found))


def _some(named: Any) -> str:
    names = [name for name in named if name]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# ------------------------------------------------------------------------------------------------------- wrap policies


def _chosen(section: str, model: nn.Module, config: ShardingConfig) -> list[nn.Module]:
    if config.policy == "none":
        return []
    if config.policy == "size":
        return _by_size(section, model, config.min_num_params or _LARGE)
    names = set(config.transformer_classes or ()) or _said_by_model(model)
    found = [module for module in model.modules() if _name(module) in names]
    missing = set(config.transformer_classes or ()) - {_name(module) for module in found}
    if missing:
        raise ConfigError(
            f"{section}.transformer_classes: {_name(model)} has no module of class {', '.join(sorted(missing))}. "
            f"It has: {_classes(model)}"
        )
    if config.policy == "transformer" and not found:
        raise ConfigError(
            f"{section}.wrap_policy: transformer needs transformer_classes, since {_name(model)} does not name its own "
            f"(_no_split_modules). Its modules are of the classes: {_classes(model)}"
        )
    return [module for module in found if module is not model]


def _said_by_model(model: nn.Module) -> set[str]:
    """Class names that a model, or one inside it, says are not to be split."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _can_be_called(module: nn.Module) -> bool:
    """Whether it is used by calling it. Containers are used by what is in them."""
    return type(module).forward is not nn.Module.forward


def _by_size(section: str, model: nn.Module, limit: int) -> list[nn.Module]:
    """The smallest modules with that many parameters, and those around them with as many again."""
    found: list[nn.Module] = []
    counted: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Parameters that are in no unit yet."""
        # What is inside an attention is used without being called.
        parameters = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
        new = [parameter for parameter in parameters if id(parameter) not in counted]
        counted.update(map(id, new))
        count = sum(parameter.numel() for parameter in new)
        if not isinstance(module, nn.MultiheadAttention):
            count += sum(visit(child) for child in module.children())
        if count < limit or not _can_be_called(module):
            return count
        found.append(module)
        return 0

    visit(model)
    if not found:
        total = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigError(
            f"{section}.wrap_policy: size finds no module of at least {limit} parameters in {_name(model)}, which has "
            f"{total} in all; lower {section}.min_num_params, or set wrap_policy: none"
        )
    return found


# ----------------------------------------------------------------------------------------------------- what can't be


def _shares_with_outside(model: nn.Module, unit: nn.Module, wholes: Set[int]) -> bool:
    """Whether a parameter is used both in a unit and outside of it: then the unit around both must hold it."""
    inside = {id(module) for module in unit.modules()}
    mine = {id(p) for p in unit.parameters()} - wholes
    others = {id(p) for module in model.modules() if id(module) not in inside for p in module.parameters(recurse=False)}
    if not mine & others:
        return False
    name = next(name for name, module in model.named_modules() if module is unit)
    logger.info("%s shares a parameter with the rest of %s, so it is no unit of its own", name, _name(model))
    return True


def _apart_by_dtype(
    model: nn.Module, units: Sequence[nn.Module], wholes: Set[int], frozen_counts: bool
) -> list[nn.Module]:
    """More units, so that each is of one dtype: gradients that are reduced together must be."""
    more: list[nn.Module] = []

    def counts(parameter: nn.Parameter) -> bool:
        return id(parameter) not in wholes and (frozen_counts or parameter.requires_grad)

    def dtypes(modules: Sequence[nn.Module]) -> Counter[torch.dtype]:
        found = {id(p): p for module in modules for p in module.parameters(recurse=False) if counts(p)}
        sizes: Counter[torch.dtype] = Counter()
        for parameter in found.values():
            sizes[parameter.dtype] += parameter.numel()
        return sizes

    def split(module: nn.Module, main: torch.dtype, members: set[int]) -> None:
        inside = [inner for inner in module.modules() if id(inner) in members]
        found = dtypes(inside)
        if set(found) <= {main}:
            return
        if len(found) == 1 and _can_be_called(module):
            more.append(module)
            return
        own = dtypes([module])
        if set(own) - {main}:
            names = [f"{name} ({p.dtype})" for name, p in module.named_parameters(recurse=False)]
            raise DrivetrainError(
                f"a {_name(module)} holds parameters of several dtypes, which can't be cut together with the {main} "
                f"ones around it: {', '.join(names)}. Give them one dtype, or leave the module out (ignored_modules)"
            )
        for child in module.children():
            if id(child) in members:
                split(child, main, members)

    plan = Plan(model=model, units=tuple(units), recomputed=(), ignored=(), whole=frozenset())
    for unit in (*units, model):
        members = list(plan.members(unit))
        found = dtypes(members)
        if len(found) > 1:
            main = found.most_common(1)[0][0]
            ids = {id(module) for module in members}
            for child in [unit] if set(dtypes([unit])) - {main} else unit.children():
                if id(child) in ids:
                    split(child, main, ids)
    return more
