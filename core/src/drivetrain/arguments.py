"""Arguments of ``Accelerator(...)`` as settings, the most preferred source of all."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import attrs

from drivetrain import registry
from drivetrain.accumulation import GradientAccumulationPlugin
from drivetrain.data.configuration import DataLoaderConfiguration
from drivetrain.elsewhere import KEYWORDS
from drivetrain.handlers import TorchDynamoPlugin
from drivetrain.plugin import KwargsHandler

__all__ = ["loader_configuration", "settings_from_code"]

_MOVED = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
"""Fields of ``DataLoaderConfiguration`` that older scripts pass to the Accelerator itself."""

_COMPILING = ("dynamo_backend", "dynamo_plugin")
"""Keywords that core claims itself: the name of a compiler, or all of its settings."""


def loader_configuration(
    given: DataLoaderConfiguration | None, keywords: MutableMapping[str, Any]
) -> DataLoaderConfiguration:
    """How loaders are sharded: as configured, but for what was passed to the Accelerator itself, which is taken out.

    Args:
        given: ``dataloader_config``.
        keywords: Of the Accelerator; those that have moved are removed. None in them leaves the choice to ``given``.

    Raises:
        TypeError: ``given`` is something else, or a value is of the wrong type.
    """
    if given is not None and not isinstance(given, DataLoaderConfiguration):
        raise TypeError(f"dataloader_config takes a DataLoaderConfiguration; got {type(given).__name__}")
    moved = {name: keywords.pop(name) for name in _MOVED if name in keywords}
    wanted = {name: value for name, value in moved.items() if value is not None}
    return attrs.evolve(given or DataLoaderConfiguration(), **wanted) if wanted else given or DataLoaderConfiguration()


def settings_from_code(
    *,
    handlers: Sequence[KwargsHandler],
    keywords: Mapping[str, Any],
    gradient_accumulation_steps: int | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    **plain: Any,
) -> tuple[dict[str, Any], dict[type, KwargsHandler]]:
    """The settings, by key (``section.key`` for those of plugins), and the handlers by class.

    Raises:
        TypeError: A handler or ``gradient_accumulation_plugin`` is none, or no installed plugin claims a keyword.
        ValueError: Two handlers of a class, or accumulation steps given twice with different values.
    """
    code = {key: value for key, value in plain.items() if value is not None}
    by_class: dict[type, KwargsHandler] = {}
    if not isinstance(handlers, (list, tuple)):
        raise TypeError(f"kwargs_handlers takes a list of KwargsHandler objects; got {handlers!r}")
    for handler in [*handlers, *_claimed(keywords)]:
        if not isinstance(handler, KwargsHandler):
            raise TypeError(f"kwargs_handlers takes KwargsHandler objects; got {type(handler).__name__}")
        if type(handler) in by_class:
            raise ValueError(f"kwargs_handlers has two {type(handler).__name__}; give one")
        by_class[type(handler)] = handler
        _take(code, handler)
    steps = _steps(gradient_accumulation_steps, gradient_accumulation_plugin)
    if steps is not None:
        code["gradient_accumulation_steps"] = steps
    return code, by_class


def _claimed(keywords: Mapping[str, Any]) -> list[Any]:
    found = []
    for keyword, value in keywords.items():
        if keyword in _COMPILING:
            if value is not None:
                found.append(value if isinstance(value, TorchDynamoPlugin) else TorchDynamoPlugin(backend=value))
            continue
        entry = registry.keyword(keyword)
        if entry is None and value is None and (keyword in KEYWORDS or keyword.endswith(("_plugin", "_plugins"))):
            continue  # scripts pass on what their own arguments may have asked of a plugin
        if entry is None:
            raise TypeError(
                f"Accelerator() got an unexpected keyword {keyword!r}, which no installed plugin claims"
                f"{_close(keyword)}"
            )
        if value is not None:
            found.append(value)
    return found


def _close(keyword: str) -> str:
    if keyword in KEYWORDS:
        return f"; use instead: {KEYWORDS[keyword]}"
    import inspect

    from drivetrain.accelerator import Accelerator

    signature = inspect.signature(Accelerator)
    known = [name for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD]
    close = difflib.get_close_matches(keyword, [*known, *registry.keywords(), *_COMPILING], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _take(code: dict[str, Any], handler: KwargsHandler) -> None:
    code.update(handler.settings())
    if handler.selects is not None:
        asked = code.setdefault("backend", handler.selects)
        if asked != handler.selects:
            raise ValueError(
                f"backend={asked!r} and a {type(handler).__name__} (for {handler.selects!r}) contradict each other"
            )


def _steps(steps: int | None, plugin: GradientAccumulationPlugin | None) -> int | None:
    if plugin is not None and not isinstance(plugin, GradientAccumulationPlugin):
        raise TypeError(f"gradient_accumulation_plugin takes a GradientAccumulationPlugin; got {type(plugin).__name__}")
    from_plugin = None if plugin is None else plugin.num_steps
    if steps is not None and from_plugin is not None and steps != from_plugin:
        raise ValueError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin with num_steps={from_plugin} "
            f"contradict each other; give one of them"
        )
    return from_plugin if steps is None else steps
