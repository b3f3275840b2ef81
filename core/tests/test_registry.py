"""What is installed, found by name. Distributions are made up in ``site``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain import discovery, registry
from drivetrain.errors import PluginError, PluginNotFoundError

# ------------------------------------------------------------------------------------------------------------ discovery


def test_discovery_reads_metadata_and_imports_no_plugin(site):
    site.install_backend("alpha", module="raise SystemExit('imported')", version="0.3", requires=["attrs>=1"])
    (entry,) = registry.entries()["backend"]["alpha"]
    assert entry == registry.Entry(
        role="backend",
        name="alpha",
        value="fake_backend_alpha:Plug",
        distribution="alpha-dist",
        version="0.3",
        requires=("attrs>=1",),
    )
    assert "fake_backend_alpha" not in sys.modules


def test_entry_says_whose_it_is(site):
    site.install_backend("alpha", version="0.3")
    entry = registry.find("backend", "alpha")
    assert str(entry) == "backend 'alpha' (alpha-dist 0.3)"
    assert str(entry.origin) == str(entry)


def test_discovery_is_read_once_per_process_until_refreshed(site, monkeypatch):
    site.install_backend("alpha")
    reads = []
    distributions = discovery._distributions
    monkeypatch.setattr(discovery, "_distributions", lambda: reads.append(1) or distributions())
    for _ in range(3):
        registry.entries(), registry.keywords(), registry.exports()
    assert len(reads) == 1
    registry.refresh()
    registry.entries()
    assert len(reads) == 2


def test_second_copy_of_a_distribution_further_down_the_path_is_not_a_clash(site, tmp_path, monkeypatch):
    site.install_backend("alpha", version="2.0")
    other = type(site)(tmp_path / "other")
    other.install_backend("alpha", version="1.0")
    path = [str(site.directory), str(other.directory)]
    monkeypatch.setattr(discovery, "_distributions", lambda: discovery.importlib.metadata.distributions(path=path))
    registry.refresh()
    assert registry.find("backend", "alpha").version == "2.0"


def test_unreadable_metadata_is_reported_and_disturbs_no_other_plugin(site):
    site.install_backend("alpha")
    broken = site.install("broken", entry_points={"drivetrain.backends": {"bad": "bad:Plug"}})
    (broken / "METADATA").unlink()
    registry.refresh()
    assert set(registry.entries()["backend"]) == {"alpha"}
    (problem,) = discovery.problems()
    assert str(broken) in problem
    with pytest.raises(PluginNotFoundError, match=r"broken-1.0.dist-info are ignored"):
        registry.find("backend", "bad")


def test_somebody_elses_malformed_entry_points_are_not_even_parsed(site):
    site.install_backend("alpha")
    (site.install("stranger") / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    registry.refresh()
    assert set(registry.entries()["backend"]) == {"alpha"}
    assert discovery.problems() == ()


def test_misspelt_group_is_reported_with_the_right_one(site):
    site.install("typo", entry_points={"drivetrain.backend": {"alpha": "m:Plug"}})
    (problem,) = discovery.problems()
    assert "no group is called 'drivetrain.backend'; did you mean 'drivetrain.backends'?" in problem


def test_extras_are_those_of_core(site):
    assert registry.extras() == {"alpha", "beta", "dev", "narrow"}


def test_nothing_of_the_registry_imports_torch():
    code = "import sys; from drivetrain import registry; registry.entries(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------------------- finding


def test_unknown_name_says_where_what_was_meant_and_what_is_installed(site):
    site.install_backend("gamma", version="0.1")
    site.install_backend("solo", version="0.2")
    with pytest.raises(PluginNotFoundError) as caught:
        registry.find("backend", "gmama", where="config.yaml:3:10")
    assert str(caught.value) == (
        "config.yaml:3:10: no backend 'gmama'; did you mean 'gamma'? "
        "Installed: gamma (gamma-dist 0.1), solo (solo-dist 0.2)"
    )


def test_name_of_ours_that_is_not_installed_comes_with_the_command(site):
    with pytest.raises(
        PluginNotFoundError, match=r"^backend 'beta' is not installed: pip install \"drivetrain\[beta\]\"$"
    ):
        registry.find("backend", "beta")


def test_misspelt_name_of_ours_comes_with_the_command_too(site):
    with pytest.raises(PluginNotFoundError, match=r"did you mean 'beta'\? It is not installed: pip install .*\[beta\]"):
        registry.find("backend", "btea")


def test_a_name_in_capitals_is_recognised(site):
    site.install_backend("gamma")
    with pytest.raises(PluginNotFoundError, match=r"no backend 'GAMMA'; did you mean 'gamma'\?"):
        registry.find("backend", "GAMMA")


def test_what_resembles_a_name_only_a_little_is_no_reason_to_install_something(site):
    with pytest.raises(PluginNotFoundError) as caught:
        registry.find("backend", "bat")
    assert "did you mean" not in str(caught.value)


def test_name_unlike_any_lists_what_could_be_installed(site):
    with pytest.raises(PluginNotFoundError, match=r"Installed: none\. To be had by .*: alpha, beta$"):
        registry.find("backend", "zzz")
    with pytest.raises(PluginNotFoundError, match=r"Installed: none\. To be had by .*: narrow$"):
        registry.find("precision", "zzz")
    with pytest.raises(PluginNotFoundError, match=r"no device 'zzz'\. Installed: none; auto takes whatever"):
        registry.find("device", "zzz")


@pytest.mark.parametrize("name", ["narrow", "dev"])
def test_extra_without_a_plugin_of_the_role_is_no_way_to_have_one(site, name):
    with pytest.raises(PluginNotFoundError, match=rf"^no backend '{name}'"):
        registry.find("backend", name)


def test_roles_of_extras_are_read_from_cores_own_metadata_alone(site):
    site.install("stranger", entry_points={"drivetrain.extras": {"dev": "backend"}})
    assert discovery.extra_roles() == {"alpha": "backend", "beta": "backend", "narrow": "precision"}


def test_name_of_another_role_is_recognised(site):
    site.install_precision("half")
    with pytest.raises(PluginNotFoundError, match=r"'half' is a precision: mixed_precision: half"):
        registry.find("backend", "half")


def test_clash_names_both_distributions_and_the_way_out(site):
    site.install_backend("alpha", distribution="drivetrain-alpha", version="0.1.0")
    site.install_backend("alpha", distribution="evil-alpha", version="9")
    with pytest.raises(PluginError) as caught:
        registry.find("backend", "alpha")
    text = str(caught.value)
    assert text.startswith("backend 'alpha' is provided by both ")
    assert "drivetrain-alpha 0.1.0" in text
    assert "evil-alpha 9" in text
    assert "name it in full: backend: " in text


def test_name_in_full_resolves_a_clash(site):
    site.install_backend("alpha", distribution="drivetrain-alpha")
    site.install_backend("alpha", distribution="Evil_Alpha")
    assert registry.find("backend", "evil-alpha:alpha").distribution == "Evil_Alpha"
    assert registry.find("backend", "drivetrain-alpha:alpha").distribution == "drivetrain-alpha"
    with pytest.raises(PluginNotFoundError):
        registry.find("backend", "nobody:alpha")


# -------------------------------------------------------------------------------------------------- exports, keywords


def test_exported_name_is_loaded_when_used(site):
    site.install(
        "extra",
        entry_points={"drivetrain.exports": {"Answer": "fake_export:ANSWER"}},
        modules={"fake_export": "ANSWER = 42"},
    )
    assert "fake_export" not in sys.modules
    assert registry.exported("Answer") == 42


def test_exported_name_is_reached_through_the_package(site):
    import drivetrain

    site.install(
        "extra",
        entry_points={"drivetrain.exports": {"Answer": "fake_export:ANSWER"}},
        modules={"fake_export": "ANSWER = 42"},
    )
    try:
        assert drivetrain.Answer == 42
    finally:
        vars(drivetrain).pop("Answer", None)


def test_unknown_export_is_an_attribute_error_with_the_close_name(site):
    site.install("extra", entry_points={"drivetrain.exports": {"Answer": "fake_export:ANSWER"}})
    with pytest.raises(AttributeError, match=r"no attribute 'Anwser'.*did you mean 'Answer', of extra\?"):
        registry.exported("Anwser")


def test_broken_export_is_no_attribute_error(site):
    site.install("extra", entry_points={"drivetrain.exports": {"Answer": "no_such_module_xyz:ANSWER"}})
    with pytest.raises(PluginError, match="export 'Answer'"):
        registry.exported("Answer")


def test_keyword_gives_the_class_its_value_must_be_of(site):
    module = """
    from drivetrain.plugin import KwargsHandler
    class Handler(KwargsHandler): section = "alpha"
    class Other: pass
    """
    site.install(
        "extra",
        entry_points={"drivetrain.keywords": {"alpha_plugin": "fake_keyword:Handler", "bad": "fake_keyword:Other"}},
        modules={"fake_keyword": module},
    )
    assert registry.keyword("nobody_claims_this") is None
    assert registry.load(registry.keyword("alpha_plugin")).section == "alpha"
    with pytest.raises(PluginError, match=r"no subclass of drivetrain.plugin.KwargsHandler"):
        registry.load(registry.keyword("bad"))


def test_keyword_claimed_twice_is_an_error_naming_both(site):
    for name in ("one", "two"):
        site.install(name, entry_points={"drivetrain.keywords": {"alpha_plugin": "fake_keyword:Handler"}})
    with pytest.raises(PluginError, match=r"keyword 'alpha_plugin' is provided by both .*; uninstall one$"):
        registry.keyword("alpha_plugin")


def test_tracker_needs_no_base_class(site):
    site.install(
        "extra",
        entry_points={"drivetrain.trackers": {"log": "fake_tracker:Log"}},
        modules={"fake_tracker": "class Log: pass"},
    )
    assert registry.load(registry.find("tracker", "log")).__name__ == "Log"
