"""Where hooks meet plugins: one guarded plugin manager per run, and hooks resolved to plain callables.

pluggy does the wiring (marking, validation, calling all). What it does not do for this use is done here: precedence by
role, one implementation for a hook with one answer, and errors that say whose code failed. pluggy's own silent
traps are turned into errors at registration, each with its test in ``core/tests/test_binding_traps.py``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import pluggy

from drivetrain import hookspecs
from drivetrain.errors import PluginError, add_note
from drivetrain.plugin import Plugin

__all__ = ["Hooks", "Origin"]

# Order in which hooks that call everyone do so.
_CALL_ORDER = ("backend", "precision", "device")


@attrs.frozen
class Origin:
    """Whose code a plugin is, for messages."""

    role: str
    name: str
    distribution: str = "this program"
    version: str = ""

    def __str__(self) -> str:
        dist = f"{self.distribution} {self.version}".strip()
        return f"{self.role} {self.name!r} ({dist})"


class _Manager(pluggy.PluginManager):
    """A plugin manager that refuses what pluggy passes over in silence."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        method = f"{type(plugin).__qualname__}.{name}"
        if options is None:
            _check_unmarked(plugin, name, method)
            return None
        hook = options.get("specname") or name
        known = hookspecs.hooks()
        if hook not in known and options.get("optionalhook"):
            return None  # of a newer contract, and the plugin says that it can do without
        if hook not in known:
            raise PluginError(
                f"{method} is marked as a hook, but the contract has no hook {hook!r}{_did_you_mean(hook, known)} "
                f"(every hook: drivetrain.hookspecs)"
            )
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(
                f"{method} is a hook wrapper; API 1 has none. Call drivetrain.defaults.{hook} from an ordinary "
                f"implementation instead"
            )
        if options.get("tryfirst") or options.get("trylast"):
            raise PluginError(
                f"{method} asks to be called first or last, but the contract orders plugins by their role"
            )
        role = getattr(plugin, "role", None)
        if role not in known[hook].roles:
            raise PluginError(
                f"{method}: a {role} can't implement {hook!r}, which is for: {', '.join(known[hook].roles)}"
            )
        _check_signature(getattr(plugin, name), hook, method)
        return options


def _check_unmarked(plugin: Any, name: str, method: str) -> None:
    """Refuse an attribute that has a hook's name but is none: it would disable an inherited implementation as well."""
    if name not in hookspecs.hooks():
        return
    found = inspect.getattr_static(plugin, name)
    if callable(found) or isinstance(found, (classmethod, staticmethod, functools.partialmethod)):
        raise PluginError(
            f"{method} has the name of a hook but not its marker; put @hookimpl on it "
            f"(from drivetrain.plugin import hookimpl), or rename it"
        )
    for base in type(plugin).__mro__:
        if hasattr(vars(base).get(name), "drivetrain_impl"):
            raise PluginError(f"the attribute {method} hides the hook that {base.__qualname__} implements; rename it")


def _check_signature(function: Callable[..., Any], hook: str, method: str) -> None:
    """Refuse parameters and kinds of functions that would be called with less than they wait for, without a word."""
    contract = _arguments(hook)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginError(
                f"{method} takes {str(parameter).split(':')[0]!r}, which is {parameter.kind.description}; a hook's "
                f"arguments are named one by one, any of: {', '.join(contract)}"
            )
        if parameter.name not in contract:
            raise PluginError(
                f"{method} takes {parameter.name!r}, but hook {hook!r} has no such argument"
                f"{_did_you_mean(parameter.name, contract)} It has: {', '.join(contract)}"
            )
    answers = hookspecs.hooks()[hook].returns
    if inspect.iscoroutinefunction(function) or (inspect.isgeneratorfunction(function) and not answers):
        raise PluginError(f"{method} is a coroutine or generator, which nobody would run; write an ordinary function")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


class Hooks:
    """The hooks of one run: ``hooks.unwrap(run=run, model=model)`` calls whoever answers it, core's default included.

    Args:
        defaults: Object or module with one callable for each hook, named like it.
    """

    def __init__(self, defaults: Any) -> None:
        self._defaults = defaults
        self._manager = _Manager("drivetrain")
        self._manager.add_hookspecs(hookspecs.HookSpecs)
        self._plugins: dict[str, tuple[Plugin, Origin]] = {}
        self._found: dict[str, list[_Implementation]] = {}

    def register(self, plugin: Plugin, origin: Origin) -> None:
        """Add the plugin of a role.

        Raises:
            PluginError: The plugin breaks the contract, or its role is taken.
        """
        if origin.role in self._plugins:
            raise PluginError(f"{origin}: this run has a {origin.role} already: {self._plugins[origin.role][1]}")
        name = f"{origin.role}:{origin.name}"
        try:
            self._check(plugin, origin)
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            self._check_single(plugin)
        except Exception as error:  # a plugin's class can raise anything while it is looked through
            if self._manager.get_plugin(name) is plugin:
                self._manager.unregister(name=name)  # nothing of it stays behind
            text = str(error).strip().replace("\n", "; ") or type(error).__name__
            raise PluginError(f"{origin} breaks the plugin contract: {text}") from error
        self._plugins[origin.role] = (plugin, origin)
        self._found.clear()

    def _check(self, plugin: Plugin, origin: Origin) -> None:
        kind = type(plugin).__qualname__
        if getattr(plugin, "role", None) != origin.role:
            raise PluginError(f"{kind} is a {getattr(plugin, 'role', None)}, not a {origin.role}")
        try:
            hash(plugin)
        except TypeError:
            # attrs.define makes classes unhashable unless told otherwise, and pluggy keeps plugins in sets.
            raise PluginError(f"{kind} is unhashable; if it is an attrs class, use @attrs.define(eq=False)") from None
        if any(plugin == other for other, _ in self._plugins.values()):
            raise PluginError(f"{kind} compares equal to another plugin; if it is an attrs class, use eq=False")

    def _check_single(self, plugin: Plugin) -> None:
        for caller in self._manager.get_hookcallers(plugin) or ():
            methods = [impl.function.__name__ for impl in caller.get_hookimpls() if impl.plugin is plugin]
            if len(methods) > 1:
                raise PluginError(
                    f"{type(plugin).__qualname__} implements hook {caller.name!r} {len(methods)} times: "
                    f"{', '.join(sorted(methods))}"
                )

    def plugin(self, role: str) -> Plugin:
        """The plugin of a role."""
        return self._plugins[role][0]

    def origin(self, role: str) -> Origin:
        """Whose plugin has a role."""
        return self._plugins[role][1]

    def owner(self, name: str) -> Origin | None:
        """Whose implementation answers a hook with one answer; None if core's default does."""
        found = self._implementation(name)
        return None if found is None else found.origin

    def owners(self, name: str) -> list[Origin]:
        """Whose implementations a hook that calls everyone calls, in that order; core's default comes after them."""
        return [found.origin for found in self._everyone(name)]

    def _implementation(self, name: str) -> _Implementation | None:
        """Who answers a hook with one answer: the first of its roles whose plugin implements it."""
        return next(iter(self._everyone(name)), None)

    def _everyone(self, name: str) -> list[_Implementation]:
        """Who implements a hook, in order of precedence, or of being called where all are."""
        if name not in self._found:
            info = hookspecs.hooks()[name]
            functions = {id(impl.plugin): impl.function for impl in getattr(self._manager.hook, name).get_hookimpls()}
            order = _CALL_ORDER if info.all_called else info.roles
            chosen = [self._plugins[role] for role in order if role in self._plugins]
            self._found[name] = [
                _Implementation(functions[id(plugin)], origin) for plugin, origin in chosen if id(plugin) in functions
            ]
        return self._found[name]

    def bind(self, name: str) -> Callable[..., Any]:
        """The hook as a plain callable that takes the contract's arguments by position, at the cost of a method.

        With one implementation that takes all arguments it *is* that method. Exceptions pass through untouched: callers
        on the hot path add the owner with :meth:`blame`.
        """
        arguments = _arguments(name)
        default: Callable[..., Any] = getattr(self._defaults, name)
        if hookspecs.hooks()[name].all_called:
            return _call_all(name, self._everyone(name), default)
        found = self._implementation(name)
        return default if found is None else _adapt(found.function, found.takes, arguments)

    def takes(self, name: str, argument: str) -> bool:
        """Whether whoever answers the hook takes that argument. Core's defaults take all."""
        found = self._implementation(name)
        return found is None or argument in found.takes

    def blame(self, error: BaseException, name: str) -> None:
        """Note on an exception that came out of a bound hook in whose implementation it happened."""
        if hookspecs.hooks()[name].all_called:
            everyone = self._everyone(name)
            # With several, each call has noted its own already.
            origin = everyone[0].origin if _is_alone(everyone, getattr(self._defaults, name)) else None
        else:
            origin = self.owner(name)
        if origin is not None:
            _note(error, name, origin)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in hookspecs.hooks():
            raise AttributeError(f"the contract has no hook {name!r}{_did_you_mean(name, hookspecs.hooks())}")
        call = functools.partial(self._call, name)
        self.__dict__[name] = call
        return call

    def _call(self, name: str, /, **arguments: Any) -> Any:
        if arguments.keys() != set(_arguments(name)):
            raise TypeError(
                f"hook {name!r} is called with {', '.join(_arguments(name))} as keywords, not with "
                f"{', '.join(arguments) or 'nothing'}"
            )
        info = hookspecs.hooks()[name]
        default = getattr(self._defaults, name)
        if info.all_called:
            return self._call_everyone(name, default, arguments)
        found = self._implementation(name)
        if found is None:
            return default(**arguments)
        answer = found.call(name, arguments)
        if answer is None and info.returns:
            raise PluginError(f"hook {name!r} of {found.origin} returned None, but must return something")
        return answer

    def _call_everyone(self, name: str, default: Callable[..., Any], arguments: Mapping[str, Any]) -> list[Any]:
        """Answers of all plugins and of core's default. One that fails keeps no other from being called.

        Taking down a run is one of these hooks: a plugin's fault must not leave another's processes behind.
        """
        answers: list[Any] = []
        failures: list[Exception] = []
        calls = [functools.partial(found.call, name, arguments) for found in self._everyone(name)]
        for call in [*calls, functools.partial(default, **arguments)]:
            try:
                answers.append(call())
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers


@attrs.frozen(eq=False)
class _Implementation:
    """A plugin's implementation of a hook."""

    function: Callable[..., Any]
    origin: Origin
    takes: tuple[str, ...] = attrs.field(init=False)
    """Names of the arguments it takes, those with a default of their own included."""

    @takes.default
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call it with those of the contract's arguments that it takes."""
        try:
            return self.function(**{key: arguments[key] for key in self.takes})
        except Exception as error:
            _note(error, name, self.origin)
            raise


def _note(error: BaseException, name: str, origin: Origin) -> None:
    add_note(error, f"in hook {name!r} of {origin}")


@functools.cache
def _arguments(name: str) -> tuple[str, ...]:
    """Argument names of a hook in the contract's order."""
    return tuple(inspect.signature(getattr(hookspecs.HookSpecs, name)).parameters)[1:]


def _adapt(function: Callable[..., Any], takes: tuple[str, ...], arguments: tuple[str, ...]) -> Callable[..., Any]:
    """``function`` as a callable of all the contract's arguments, positionally.

    Generated code, since a generic ``lambda *args`` costs three times as much as the call it adapts.
    """
    if takes == arguments:
        return function
    source = f"lambda {', '.join(arguments)}: function({', '.join(f'{name}={name}' for name in takes)})"
    adapted: Callable[..., Any] = eval(source, {"function": function})
    functools.update_wrapper(adapted, function)
    return adapted


def _is_alone(everyone: Sequence[_Implementation], default: Callable[..., Any]) -> bool:
    """Whether calling everyone means calling one plugin."""
    return len(everyone) == 1 and getattr(default, "does_nothing", False)


def _call_all(name: str, everyone: Sequence[_Implementation], default: Callable[..., Any]) -> Callable[..., Any]:
    """All implementations and core's default as one callable; the only one itself, where there is only one."""
    arguments = _arguments(name)
    functions = [_adapt(found.function, found.takes, arguments) for found in everyone]
    if not functions:
        return default
    if _is_alone(everyone, default):
        return functions[0]
    calls = tuple(zip(functions, (found.origin for found in everyone), strict=True))

    def call_all(*values: Any) -> None:
        for function, origin in calls:
            try:
                function(*values)
            except Exception as error:
                _note(error, name, origin)
                raise
        default(*values)

    return call_all
