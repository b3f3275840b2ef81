"""Hooks of a run: who answers, what binding costs, and whose an exception is."""

from __future__ import annotations

import inspect

import pytest

from drivetrain import hookspecs
from drivetrain.binding import Hooks, Origin
from drivetrain.errors import PluginError
from drivetrain.plugin import Backend, Device, Precision, hookimpl


class Defaults:
    """Stands for ``drivetrain.defaults``: says that the default answered, and with what."""

    def __init__(self) -> None:
        self.called = []
        for name in hookspecs.hooks():
            vars(self)[name] = self._default(name)

    def _default(self, name):
        def default(*values, **arguments):
            self.called.append(name)
            return ("default", name, values or arguments)

        return default


def hooks_with(*plugins, defaults=None) -> Hooks:
    hooks = Hooks(defaults or Defaults())
    for plugin in plugins:
        hooks.register(plugin, Origin(plugin.role, "mine", f"{plugin.role}-dist", "1.2"))
    return hooks


class Fine(Backend):
    api = (1, 0)

    @hookimpl
    def step(self, run, optimizer, closure):
        return True


# ------------------------------------------------------------------------------------------------------- who answers


def test_bound_hook_is_the_plugins_own_method():
    backend = Fine()
    bound = hooks_with(backend).bind("step")
    assert bound.__func__ is Fine.step
    assert bound.__self__ is backend


def test_bound_hook_without_a_plugin_is_the_default_itself():
    defaults = Defaults()
    assert hooks_with(defaults=defaults).bind("step") is defaults.step
    assert hooks_with(Fine(), defaults=defaults).bind("backward") is defaults.backward


def test_every_argument_subset_and_order_is_called_with_its_own_arguments():
    class Subsets(Backend):
        @hookimpl
        def backward(self, loss):
            return ("loss", loss)

        @hookimpl
        def step(self, closure, run):
            return (run, closure)

        @hookimpl
        def zero_grad(self):
            return "nothing"

        @hookimpl
        def clip_grad_norm(self, run, parameters, max_norm, norm_type=2.0):
            return (run, parameters, max_norm, norm_type)

    hooks = hooks_with(Subsets())
    assert hooks.bind("backward")("run", "the loss", "models", {}) == ("loss", "the loss")
    assert hooks.bind("step")("run", "optimizer", "closure") == ("run", "closure")
    assert hooks.bind("zero_grad")("run", "optimizer", True) == "nothing"
    assert hooks.backward(run=1, loss=2, models=3, options=4) == ("loss", 2)
    # An argument with a default of its own is still the contract's, and gets the contract's value.
    assert hooks.bind("clip_grad_norm")(1, 2, 3, "inf") == (1, 2, 3, "inf")
    assert hooks.clip_grad_norm(run=1, parameters=2, max_norm=3, norm_type="inf") == (1, 2, 3, "inf")


def test_takes_tells_whether_an_argument_would_arrive():
    class Some(Backend):
        @hookimpl
        def backward(self, loss, models=()):
            pass

    hooks = hooks_with(Some())
    assert hooks.takes("backward", "loss")
    assert hooks.takes("backward", "models")
    assert not hooks.takes("backward", "options")
    assert hooks.takes("step", "closure")  # core's default takes all


def test_first_role_of_a_hook_wins_whatever_the_order_of_registration():
    class OnBackend(Backend):
        @hookimpl
        def place(self, run, batch):
            return "backend"

    class OnDevice(Device):
        @hookimpl
        def place(self, run, batch):
            return "device"

        @hookimpl
        def autocast(self, run):
            return "device"

    class OnPrecision(Precision):
        @hookimpl
        def autocast(self, run):
            return "precision"

    assert hookspecs.hooks()["place"].roles == ("backend", "device")
    assert hookspecs.hooks()["autocast"].roles == ("precision", "device")
    for plugins in ([OnBackend(), OnDevice(), OnPrecision()], [OnPrecision(), OnDevice(), OnBackend()]):
        hooks = hooks_with(*plugins)
        assert hooks.place(run=0, batch=0, non_blocking=False) == "backend"
        assert hooks.bind("place")(0, 0, False) == "backend"
        assert hooks.autocast(run=0, model=None) == "precision"
        assert str(hooks.owner("place")) == "backend 'mine' (backend-dist 1.2)"
    assert hooks_with(OnDevice()).place(run=0, batch=0, non_blocking=False) == "device"


def test_one_answer_is_never_followed_by_another_when_it_is_none():
    class Declines(Backend):
        @hookimpl
        def clip_grad_value(self, run, parameters, clip_value):
            return None

    class Eager(Device):
        @hookimpl
        def clip_grad_value(self, run, parameters, clip_value):
            raise AssertionError("a second implementation ran")

    defaults = Defaults()
    hooks = hooks_with(Declines(), Eager(), defaults=defaults)
    assert hooks.clip_grad_value(run=0, parameters=0, clip_value=0) is None
    assert hooks.bind("clip_grad_value")(0, 0, 0) is None
    assert defaults.called == []


def test_none_where_an_answer_is_due_is_an_error_that_names_the_plugin():
    class Forgets(Backend):
        @hookimpl
        def wrap_model(self, run, model):
            pass

    with pytest.raises(PluginError, match=r"hook 'wrap_model' of backend 'mine' \(backend-dist 1.2\) returned None"):
        hooks_with(Forgets()).wrap_model(run=0, model=0)


def test_hooks_that_call_everyone_go_backend_precision_device_default():
    order = []

    def plugin(base):
        class Plug(base):
            @hookimpl
            def after_step(self, run, models, applied):
                order.append(self.role)

        return Plug()

    defaults = Defaults()
    hooks = hooks_with(plugin(Device), plugin(Backend), plugin(Precision), defaults=defaults)
    hooks.bind("after_step")(1, 2, True)
    assert order == ["backend", "precision", "device"]
    assert defaults.called == ["after_step"]
    assert len(hooks.after_step(run=1, models=2, applied=True)) == 4


def test_only_caller_of_everyone_is_bound_as_itself_when_the_default_does_nothing():
    class Cuts(Backend):
        @hookimpl
        def after_step(self, run, models, applied):
            pass

    defaults = Defaults()
    defaults.after_step.does_nothing = True
    assert hooks_with(defaults=defaults).bind("after_step") is defaults.after_step
    assert hooks_with(Cuts(), defaults=defaults).bind("after_step").__func__ is Cuts.after_step


def test_plugin_of_each_role_and_its_origin_are_known():
    backend = Fine()
    hooks = hooks_with(backend)
    assert hooks.plugin("backend") is backend
    assert hooks.origin("backend").version == "1.2"


def test_two_runs_in_one_process_keep_their_plugins_apart():
    first, second = Fine(), Fine()
    assert hooks_with(first).bind("step").__self__ is first
    assert hooks_with(second).bind("step").__self__ is second


def test_registering_later_is_seen_by_what_was_asked_before():
    hooks = hooks_with()
    assert hooks.owner("step") is None
    hooks.register(Fine(), Origin("backend", "mine"))
    assert hooks.step(run=0, optimizer=0, closure=None) is True


# ------------------------------------------------------------------------------------------------------------- calling


@pytest.mark.parametrize("arguments", [{}, {"run": 0}, {"run": 0, "optimizer": 0, "closure": 0, "more": 0}])
def test_calling_a_hook_with_other_arguments_than_the_contracts_is_an_error(arguments):
    for hooks in (hooks_with(), hooks_with(Fine())):
        with pytest.raises(TypeError, match="hook 'step' is called with run, optimizer, closure as keywords"):
            hooks.step(**arguments)


def test_hook_that_does_not_exist_is_an_attribute_error_with_the_close_name():
    with pytest.raises(AttributeError, match="no hook 'stepp'; did you mean 'step'"):
        hooks_with().stepp


def test_no_hook_has_the_name_of_a_method_of_hooks():
    assert not set(hookspecs.hooks()) & {name for name in dir(Hooks) if not name.startswith("_")}


def test_exception_in_a_called_hook_says_whose_it_is(notes_of):
    class Fails(Backend):
        @hookimpl
        def wrap_model(self, run, model):
            raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer") as caught:
        hooks_with(Fails()).wrap_model(run=0, model=0)
    assert notes_of(caught.value) == ["in hook 'wrap_model' of backend 'mine' (backend-dist 1.2)"]


def test_exception_in_a_bound_hook_passes_untouched_and_is_blamed_once(notes_of):
    class Fails(Backend):
        @hookimpl
        def step(self, run, optimizer, closure):
            raise ValueError("overflow")

    hooks = hooks_with(Fails())
    with pytest.raises(ValueError, match="overflow") as caught:
        hooks.bind("step")(0, 0, None)
    assert notes_of(caught.value) == []
    hooks.blame(caught.value, "step")
    hooks.blame(caught.value, "step")
    assert notes_of(caught.value) == ["in hook 'step' of backend 'mine' (backend-dist 1.2)"]


def test_default_is_blamed_on_nobody(notes_of):
    hooks = hooks_with(Fine())
    error = ValueError("in the default")
    hooks.blame(error, "backward")
    hooks.blame(error, "after_step")
    assert notes_of(error) == []


def test_among_several_that_are_called_only_the_one_that_failed_is_named(notes_of):
    class Works(Backend):
        @hookimpl
        def after_step(self, run, models, applied):
            pass

    class Fails(Device):
        @hookimpl
        def after_step(self, run, models, applied):
            raise ValueError("lost the device")

    hooks = hooks_with(Works(), Fails())
    with pytest.raises(ValueError, match="lost the device") as caught:
        hooks.bind("after_step")(0, 0, True)
    hooks.blame(caught.value, "after_step")
    assert notes_of(caught.value) == ["in hook 'after_step' of device 'mine' (device-dist 1.2)"]


def test_class_attribute_and_signature_of_the_contract_stay_readable_through_binding():
    class Some(Backend):
        @hookimpl
        def backward(self, loss):
            """Mine."""

    bound = hooks_with(Some()).bind("backward")
    assert bound.__name__ == "backward"
    assert bound.__doc__ == "Mine."
    assert inspect.unwrap(bound).__func__ is Some.backward
