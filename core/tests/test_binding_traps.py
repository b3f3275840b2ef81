"""What pluggy passes over in silence is refused at registration, each with the cure, and nothing stays behind."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import attrs
import pluggy
import pytest

from drivetrain import hookspecs
from drivetrain.binding import Hooks, Origin
from drivetrain.errors import PluginError
from drivetrain.plugin import Backend, Device, hookimpl

DEFAULTS = SimpleNamespace(**dict.fromkeys(hookspecs.hooks()))


class Fine(Backend):
    api = (1, 0)

    @hookimpl
    def step(self, run, optimizer, closure):
        return True


def hooks_with(plugin) -> Hooks:
    hooks = Hooks(DEFAULTS)
    hooks.register(plugin, Origin(plugin.role, "mine", "mine-dist", "1.2"))
    return hooks


def refused(plugin, match: str) -> None:
    """Registration must fail with that text and whose plugin it is, and leave nothing behind."""
    hooks = Hooks(DEFAULTS)
    with pytest.raises(PluginError, match=match) as caught:
        hooks.register(plugin, Origin(plugin.role, "mine", "mine-dist", "1.2"))
    assert str(caught.value).startswith(f"{plugin.role} 'mine' (mine-dist 1.2) breaks the plugin contract: ")
    for name in hookspecs.hooks():
        assert hooks.owner(name) is None
        assert getattr(hooks._manager.hook, name).get_hookimpls() == []
    assert hooks._manager.get_plugins() == set()
    hooks.register(Fine(), Origin("backend", "mine"))  # name and role are free
    assert hooks.bind("step")(0, 1, 2) is True


def test_pluggy_alone_would_fall_through_a_none_to_the_next_plugin():
    """The trap itself, so that the guard can go when pluggy changes."""
    spec, impl = pluggy.HookspecMarker("trap"), pluggy.HookimplMarker("trap")

    class Specs:
        @spec(firstresult=True)
        def step(self):
            pass

    ran = []

    def plugin(answer):
        return SimpleNamespace(step=impl(lambda: ran.append(answer) or answer))

    manager = pluggy.PluginManager("trap")
    manager.add_hookspecs(Specs)
    manager.register(plugin("second"))
    manager.register(plugin(None))
    manager.hook.step()
    assert ran == [None, "second"]


def test_misspelt_hook_is_refused_with_the_close_name():
    class Misspelt(Backend):
        @hookimpl
        def wrap_modle(self, run, model):
            return model

    refused(Misspelt(), r"Misspelt.wrap_modle .* no hook 'wrap_modle'; did you mean 'wrap_model'\?")


def test_hook_of_a_newer_contract_may_be_marked_optional():
    class Newer(Backend):
        @hookimpl(optionalhook=True)
        def hook_of_tomorrow(self, run):
            pass

    hooks_with(Newer())


def test_hook_without_marker_is_refused():
    class Unmarked(Backend):
        def wrap_model(self, run, model):
            return model

    refused(Unmarked(), r"Unmarked.wrap_model has the name of a hook but not its marker; put @hookimpl on it")


@pytest.mark.parametrize("kind", [classmethod, staticmethod, functools.partialmethod])
def test_hook_without_marker_is_refused_whatever_kind_of_method(kind):
    method = kind(lambda *values: "cpu")
    refused(type("Unmarked", (Device,), {"device": method})(), "Unmarked.device has the name of a hook")


def test_override_that_drops_the_marker_is_refused_instead_of_disabling_both():
    class Dropped(Fine):
        def step(self, run, optimizer, closure):
            return True

    refused(Dropped(), "Dropped.step has the name of a hook but not its marker")


def test_override_by_a_plain_value_is_refused_instead_of_disabling_the_hook():
    class OnClass(Fine):
        step = 3

    refused(OnClass(), r"the attribute .*OnClass.step hides the hook that Fine implements")

    class OnInstance(Fine):
        def __init__(self):
            super().__init__()
            self.step = 0

    refused(OnInstance(), r"the attribute .*OnInstance.step hides the hook that Fine implements")


def test_inherited_and_overridden_hooks_with_marker_are_used():
    class Inherits(Fine):
        pass

    class Overrides(Fine):
        @hookimpl
        def step(self, run, optimizer, closure):
            return False

    assert hooks_with(Inherits()).bind("step").__func__ is Fine.step
    assert hooks_with(Overrides()).bind("step").__func__ is Overrides.step


def test_value_with_a_hooks_name_is_fine_where_it_hides_nothing():
    class Keeps(Backend):
        def __init__(self):
            super().__init__()
            self.device = "cpu"

        @property
        def memory(self):
            raise AssertionError("evaluated while registering")

    hooks_with(Keeps())


@pytest.mark.parametrize("options", [{"wrapper": True}, {"hookwrapper": True}])
def test_wrappers_are_refused(options):
    class Wraps(Backend):
        @hookimpl(**options)
        def step(self, run, optimizer, closure):
            return (yield)

    refused(Wraps(), "Wraps.step is a hook wrapper; API 1 has none. Call drivetrain.defaults.step")


@pytest.mark.parametrize("options", [{"tryfirst": True}, {"trylast": True}])
def test_asking_for_another_order_is_refused(options):
    class Pushes(Backend):
        @hookimpl(**options)
        def step(self, run, optimizer, closure):
            return True

    refused(Pushes(), "Pushes.step asks to be called first or last")


def test_hook_of_another_role_is_refused():
    class Wrong(Device):
        @hookimpl
        def wrap_model(self, run, model):
            return model

    refused(Wrong(), r"Wrong.wrap_model: a device can't implement 'wrap_model', which is for: backend")


def test_plugin_registered_under_another_role_than_its_own_is_refused():
    hooks = Hooks(DEFAULTS)
    with pytest.raises(PluginError, match="Fine is a backend, not a device"):
        hooks.register(Fine(), Origin("device", "mine"))
    assert hooks.owner("step") is None


def test_argument_that_the_contract_has_not_is_refused():
    class Asks(Backend):
        @hookimpl
        def backward(self, run, loss, model):
            pass

    refused(Asks(), r"Asks.backward takes 'model', but hook 'backward' has no such argument; did you mean 'models'\?")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("lambda self, run, **more: None", "variadic keyword"),
        ("lambda self, *everything: None", "variadic positional"),
        ("lambda self, *, run: None", "keyword-only"),
        ("lambda self, run, /: None", "positional-only"),
    ],
)
def test_arguments_that_would_silently_stay_empty_are_refused(source, kind):
    refused(type("Catches", (Backend,), {"backward": hookimpl(eval(source))})(), f"Catches.backward takes .* {kind}")


def test_misspelt_argument_with_a_default_is_refused_instead_of_never_given():
    class Misspelt(Backend):
        @hookimpl
        def clip_grad_norm(self, run, parameters, max_norm, norm_typ=2.0):
            pass

    refused(Misspelt(), r"takes 'norm_typ'.* did you mean 'norm_type'\?")


def test_decorated_hook_keeps_the_signature_it_wraps():
    def decorate(function):
        @functools.wraps(function)
        def inner(*values, **arguments):
            return function(*values, **arguments)

        return inner

    class Decorated(Backend):
        @hookimpl
        @decorate
        def backward(self, loss):
            return loss

    assert hooks_with(Decorated()).bind("backward")("run", "loss", (), {}) == "loss"


def test_coroutines_are_refused():
    class Async(Backend):
        @hookimpl
        async def barrier(self, run, group):
            pass

    refused(Async(), "Async.barrier is a coroutine or generator")


def test_generators_are_refused_where_nobody_would_iterate():
    class Yields(Backend):
        @hookimpl
        def barrier(self, run, group):
            yield

    refused(Yields(), "Yields.barrier is a coroutine or generator")

    class Loader(Backend):
        @hookimpl
        def wrap_loader(self, run, loader):
            yield from loader

    assert list(hooks_with(Loader()).wrap_loader(run=0, loader=[1, 2])) == [1, 2]


def test_two_methods_for_one_hook_are_refused():
    class Twice(Fine):
        @hookimpl(specname="step")
        def another(self, run, optimizer, closure):
            return False

    refused(Twice(), "Twice implements hook 'step' 2 times: another, step")


def test_unhashable_attrs_plugin_is_refused_with_the_cure():
    @attrs.define
    class Unhashable(Backend):
        config: object = None

    refused(Unhashable(), r"Unhashable is unhashable; if it is an attrs class, use @attrs.define\(eq=False\)")


def test_plugin_that_only_pretends_to_be_hashable_is_refused():
    @attrs.frozen
    class Hashless(Backend):
        config: object = attrs.field(factory=dict)

    refused(Hashless(), "Hashless is unhashable")


def test_plugins_that_compare_equal_are_told_apart_or_refused():
    class Everything(Device):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    hooks = hooks_with(Fine())
    with pytest.raises(PluginError, match="Everything compares equal to another plugin"):
        hooks.register(Everything(), Origin("device", "mine"))
    assert hooks.bind("step").__func__ is Fine.step


def test_second_plugin_of_a_role_is_refused_naming_both():
    hooks = hooks_with(Fine())
    with pytest.raises(PluginError, match=r"backend 'other' \(this program\): .* already: backend 'mine' \(mine-dist"):
        hooks.register(Fine(), Origin("backend", "other"))


def test_plugin_that_raises_while_it_is_registered_leaves_nothing():
    class Raises(Fine):
        def __dir__(self):
            raise RuntimeError("boom at register")

    refused(Raises(), "boom at register")
