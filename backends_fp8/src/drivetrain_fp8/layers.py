"""Which layers of a model are converted, and putting others in their place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from drivetrain.errors import ConfigError
from drivetrain.logging import get_logger
from drivetrain_fp8.config import LayersConfig

__all__ = ["Selection", "put_back", "put_in_place", "select", "tied_to_others"]

logger = get_logger("drivetrain.fp8")

Fits = Callable[[Any], "str | None"]


@attrs.frozen(eq=False)
class Selection:
    """What is to be converted, and why the rest is not."""

    chosen: dict[str, nn.Module] = attrs.field(factory=dict)
    """By name, in the order in which the model defines them."""
    left: dict[str, str] = attrs.field(factory=dict)
    """For each layer of a kind that could be converted, but isn't: the reason."""

    def log(self, model: nn.Module, what: str) -> None:
        """Say what was decided. A model in which nothing changes is worth a warning: nobody asks for that."""
        reasons = "; ".join(f"{count} {reason}" for reason, count in Counter(self.left.values()).items())
        if self.chosen:
            left = f", {len(self.left)} are left as they are: {reasons}" if self.left else ""
            logger.info("%s: %d layers are computed %s%s", type(model).__name__, len(self.chosen), what, left)
        else:
            logger.warning(
                "nothing in %s is computed %s: %s",
                type(model).__name__,
                what,
                reasons or "it has no layers of that kind",
            )


def select(section: str, model: nn.Module, kinds: Mapping[type[nn.Module], Fits], config: LayersConfig) -> Selection:
    """Decide for a model.

    Args:
        section: Of the configuration, for messages.
        model: As the user made it.
        kinds: For each class of layers that can be converted a function that says why one of them can't be. Subclasses
            are left alone: what else they do would be lost.
        config: The section.

    Raises:
        ConfigError: ``exclude`` matches nothing in this model.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, tuple(kinds))}
    excluded = _excluded(section, model, config.exclude)
    ends = _ends(found) if config.keep_first_and_last else set()
    selection = Selection()
    for name, module in found.items():
        fits = kinds.get(type(module))
        if name in excluded:
            reason: str | None = "by exclude"
        elif name in ends:
            reason = "by keep_first_and_last"
        elif config.filter is not None and not config.filter(module, name):
            reason = "by filter"
        elif fits is None or "forward" in vars(module):
            reason = f"with a forward of their own ({type(module).__name__})"
        else:
            reason = fits(module)
        if reason is None:
            selection.chosen[name] = module
        else:
            selection.left[name] = reason
    return selection


def _excluded(section: str, model: nn.Module, wanted: Any) -> set[str]:
    """Names of the modules that ``exclude`` means, with those inside of them."""
    if not wanted:
        return set()
    names = [name for name, _ in model.named_modules()]
    if isinstance(wanted, str):
        roots = [name for name in names if re.fullmatch(wanted, name)]
        missing = [] if roots else [wanted]
    else:
        roots = [name for name in names if name in wanted]
        missing = [name for name in wanted if name not in roots]
    if missing:
        listed = [name for name in names if name]
        more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
        raise ConfigError(
            f"{section}.exclude: {', '.join(map(repr, missing))} matches no module of {type(model).__name__}. Its "
            f"modules: {', '.join(listed[:20])}{more}"
        )
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)}


def _ends(found: Mapping[str, nn.Module]) -> set[str]:
    linears = [name for name, module in found.items() if isinstance(module, nn.Linear)]
    return {linears[0], linears[-1]} if linears else set()


def tied_to_others(model: nn.Module, chosen: Mapping[str, nn.Module]) -> set[str]:
    """Names of chosen layers whose weight a module that is not chosen has too, such as an embedding."""
    inside = {id(module) for module in chosen.values()}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return {name for name, module in chosen.items() if id(module.weight) in elsewhere}


def put_in_place(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules wherever they are used; returns the model, or what replaces all of it.

    A replacement remembers the module it stands for, so that :func:`put_back` can undo this. That module is emptied:
    code that kept it for itself would go on with parameters that nothing trains.

    Args:
        model: Changed in place.
        replacements: By what they replace. They hold the parameters already.
    """
    for old, new in replacements.items():
        new.train(old.training)
        for name, value in vars(old).items():
            if name in _HOOKS or name not in vars(new):
                vars(new)[name] = value  # hooks that were registered, and whatever the user wrote on it
        old._parameters = dict.fromkeys(old._parameters)
        vars(new)[_REPLACED] = old
    return _swap(model, replacements)


def put_back(model: nn.Module) -> nn.Module:
    """Undo :func:`put_in_place`: the modules that were there, with the parameters as they are now."""
    replacements = {new: vars(new)[_REPLACED] for new in model.modules() if _REPLACED in vars(new)}
    for new, old in replacements.items():
        old.train(new.training)
        for name in old._parameters:
            old._parameters[name] = new._parameters.get(name)
    return _swap(model, replacements)


def _swap(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    if model in replacements:
        return replacements[model]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
    return model


_REPLACED = "_drivetrain_replaced"
"""Where a replacement remembers the module it stands for: in its ``__dict__``, so that it is no module inside of it."""

_HOOKS = frozenset(name for name in vars(nn.Identity()) if "_hooks" in name)
"""Where a module keeps the hooks that were registered on it."""
