"""From an entry point to a checked class and an instance. Distributions are made up in ``site``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drivetrain import registry
from drivetrain.errors import ConfigError, PluginError
from drivetrain.plugin import API, Backend, Capabilities

# ------------------------------------------------------------------------------------------------------------- loading


def test_plugin_loads_once_per_process(site):
    counter = site.directory / "imports"
    site.install_backend(
        "alpha",
        module=f"""
        from drivetrain.plugin import Backend
        with open({str(counter)!r}, "a") as file: file.write("x")
        class Plug(Backend): api = (1, 0)
        """,
    )
    first = registry.load(registry.find("backend", "alpha"))
    assert issubclass(first, Backend)
    for _ in range(3):
        assert registry.load(registry.find("backend", "alpha")) is first
        registry.load_all("backend")
    assert counter.read_text() == "x"


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import no_such_engine_xyz", "ModuleNotFoundError"),
        ("raise RuntimeError('driver too old')", "RuntimeError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("def", "SyntaxError"),
        ("", "AttributeError"),
    ],
)
def test_failed_import_names_plugin_and_entry_and_chains_the_cause(site, statement, name):
    site.install_backend("alpha", module=statement, version="0.3")
    with pytest.raises(PluginError) as caught:
        registry.load(registry.find("backend", "alpha"))
    text = str(caught.value)
    assert "backend 'alpha' (alpha-dist 0.3)" in text
    assert "fake_backend_alpha:Plug" in text
    assert "drivetrain doctor" in text
    assert type(caught.value.__cause__).__name__ == name
    assert name in text


def test_unselected_broken_plugin_never_disturbs(site):
    site.install_backend("broken", module="raise RuntimeError('boom')")
    site.install_backend("alpha")
    assert registry.create(registry.find("backend", "alpha")).capabilities == Capabilities()
    assert "fake_backend_broken" not in sys.modules


def test_interrupting_an_import_is_not_taken_for_a_broken_plugin(site):
    site.install_backend("alpha", module="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.load(registry.find("backend", "alpha"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Plug = 3", "is no class, but of type int"),
        ("class Plug: pass", r"is no subclass of drivetrain.plugin.Backend"),
        (
            "from drivetrain.plugin import *\nclass Plug(Device): api = (1, 0)",
            r"no subclass of drivetrain.plugin.Backend",
        ),
        (
            "from drivetrain.plugin import *\nclass Plug(Backend):\n    api = (1, 0)\n    role = 'device'",
            "its role is 'device', but its entry point is in the group 'drivetrain.backends'",
        ),
        (
            "from drivetrain.plugin import *\nclass Plug(Backend): pass",
            r"Plug.api should be .* \(1, 0\), but is missing",
        ),
        ("from drivetrain.plugin import *\nclass Plug(Backend): api = '1.0'", r"but is '1.0'"),
        ("from drivetrain.plugin import *\nclass Plug(Backend): api = (1, True)", r"but is \(1, True\)"),
        (
            "from drivetrain.plugin import *\nclass Plug(Backend):\n    api = (1, 0)\n    requires = 'torch>=2.9'",
            r"is a string; write a tuple: \('torch>=2.9',\)",
        ),
    ],
)
def test_class_that_breaks_the_contract_is_refused(site, source, message):
    site.install_backend("alpha", module=source)
    with pytest.raises(PluginError, match=message):
        registry.load(registry.find("backend", "alpha"))


@pytest.mark.parametrize("value", ["fake_backend_alpha", "fake_backend_alpha:", ":Plug"])
def test_entry_point_that_names_no_class_is_refused(site, value):
    site.install("odd", entry_points={"drivetrain.backends": {"alpha": value}}, modules={"fake_backend_alpha": ""})
    with pytest.raises(PluginError, match=r"backend 'alpha' \(odd 1.0\) can't be used"):
        registry.load(registry.find("backend", "alpha"))


@pytest.mark.parametrize(
    ("api", "upgrade"),
    [
        ((API[0] + 1, 0), "drivetrain"),
        ((API[0], API[1] + 1), "drivetrain"),
        ((99, 99), "drivetrain"),
        ((API[0] - 1, 7), "alpha-dist"),
    ],
)
def test_incompatible_contract_version_is_refused_with_both_numbers_and_what_to_upgrade(site, api, upgrade):
    site.install_backend("alpha", f"api = {api}")
    with pytest.raises(PluginError) as caught:
        registry.load(registry.find("backend", "alpha"))
    text = str(caught.value)
    assert f"API {api[0]}.{api[1]}" in text
    assert f"{API[0]}.{API[1]}" in text
    assert text.endswith(f"pip install --upgrade {upgrade}")


def test_older_minor_is_accepted(site, monkeypatch):
    monkeypatch.setattr("drivetrain.loading.API", (1, 4))
    site.install_backend("alpha", "api = (1, 3)")
    registry.load(registry.find("backend", "alpha"))


# -------------------------------------------------------------------------------------------------------- requirements


def _install_with_side_effect(site, requires) -> Path:
    trace = site.directory / "imported"
    module = f"""
    from drivetrain.plugin import Backend
    open({str(trace)!r}, "w").close()
    class Plug(Backend): api = (1, 0)
    """
    site.install_backend("alpha", module=module, version="0.3", requires=requires)
    return trace


@pytest.mark.parametrize(
    ("requirement", "phrase"),
    [
        ("no-such-engine-xyz>=2", "alpha-dist 0.3 needs no-such-engine-xyz>=2, which is not installed"),
        ("engine<2,>=1", "needs engine<2,>=1, but 2.5+local is installed"),
        ("drivetrain==0.0.9", "needs drivetrain==0.0.9, but 0.1.0 is installed"),
        ("engine[gpu]", "needs gpu-kernels>=3, which is not installed"),
        ("engine ~~ 2", "states the requirement 'engine ~~ 2', which is none"),
        ("odd-version>1", "needs odd-version>1, but unknown is installed"),
    ],
)
def test_unmet_requirement_is_refused_before_anything_is_imported(site, requirement, phrase):
    site.install("engine", version="2.5+local", requires=['gpu-kernels>=3; extra == "gpu"'], extras=["gpu"])
    site.install("odd-version", version="unknown")
    trace = _install_with_side_effect(site, [requirement])
    with pytest.raises(PluginError) as caught:
        registry.load(registry.find("backend", "alpha"))
    assert phrase in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    "requirement",
    [
        "engine>=2.5",
        "Engine>2.0",
        "engine==2.5",
        "attrs",
        'no-such-engine-xyz; python_version < "3"',
        'no-such-engine-xyz; extra == "engine"',
    ],
)
def test_met_and_inapplicable_requirements_pass(site, requirement):
    site.install("engine", version="2.5+local", requires=['gpu-kernels>=3; extra == "gpu"'], extras=["gpu"])
    trace = _install_with_side_effect(site, [requirement])
    registry.load(registry.find("backend", "alpha"))
    assert trace.exists()


def test_extras_that_require_each_other_end(site):
    site.install("engine", extras=["a", "b"], requires=['engine[b]; extra == "a"', 'engine[a]; extra == "b"'])
    _install_with_side_effect(site, ["engine[a]"])
    registry.load(registry.find("backend", "alpha"))


def test_core_of_another_version_is_cured_by_upgrading_both(site):
    _install_with_side_effect(site, ["drivetrain==0.2.*"])
    with pytest.raises(PluginError, match="pip install --upgrade drivetrain alpha-dist"):
        registry.load(registry.find("backend", "alpha"))


def test_engine_requirement_of_the_class_is_checked(site):
    site.install_backend("alpha", "requires = ('no-such-engine-xyz>=2.9',)")
    with pytest.raises(PluginError, match=r"its engine doesn't fit: it needs no-such-engine-xyz>=2.9, which is not"):
        registry.load(registry.find("backend", "alpha"))


def test_a_plugin_without_its_engine_can_still_be_described(site):
    site.install_backend("alpha", "requires = ('no-such-engine-xyz>=2.9',)")
    assert registry.describe(registry.find("backend", "alpha")).requires == ("no-such-engine-xyz>=2.9",)
    assert "alpha" in registry.describe_all("backend")
    assert "alpha" not in registry.load_all("backend")[0]


def test_device_may_ask_more_of_the_engine_of_a_backend(site):
    site.install("some-engine", version="0.14")
    site.install_backend("driver", "requires = ('some_engine>=0.10',)")
    site.install_backend("plain")
    site.install_device("vendor", "engine_requires = {'some-engine': '>=0.15.2', 'absent': '>=1'}")
    device = registry.find("device", "vendor")
    registry.check_engines(registry.find("backend", "plain"), device)
    with pytest.raises(PluginError, match=r"backend 'driver' .* on device 'vendor' .* some-engine>=0.15.2, but 0.14"):
        registry.check_engines(registry.find("backend", "driver"), device)


# ------------------------------------------------------------------------------------------------------------ creating


def test_create_hands_over_the_config_or_the_defaults(site):
    site.install_backend("alpha", "import attrs\n@attrs.frozen\nclass Config: x: int = 0")
    entry = registry.find("backend", "alpha")
    given = registry.load(entry).Config(x=1)
    assert registry.create(entry, given).config is given
    assert registry.create(entry).config.x == 0


def test_failing_init_is_named_and_chained(site):
    site.install_backend("alpha", "def __init__(self, config): raise ZeroDivisionError('no device')")
    with pytest.raises(PluginError, match=r"backend 'alpha' .* raised ZeroDivisionError: no device") as caught:
        registry.create(registry.find("backend", "alpha"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_refused_config_stays_a_config_error(site, notes_of):
    site.install_backend(
        "alpha",
        module="from drivetrain.plugin import *\nfrom drivetrain.errors import ConfigError\n"
        "class Plug(Backend):\n    api = (1, 0)\n"
        "    def __init__(self, config): raise ConfigError('stage must be 0-3')\n",
    )
    with pytest.raises(ConfigError, match="stage must be 0-3") as caught:
        registry.create(registry.find("backend", "alpha"))
    assert notes_of(caught.value) == ["in backend 'alpha' (alpha-dist 1.0)"]
