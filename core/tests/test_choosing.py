"""Choosing a backend, a device and a precision where none is named exactly. Distributions are made up in ``site``."""

from __future__ import annotations

import pytest

from drivetrain import registry
from drivetrain.errors import EngineError, PluginError, PluginNotFoundError
from drivetrain.plugin import Capabilities

# ------------------------------------------------------------------------------------------------------------ guessing


def test_load_all_records_what_is_broken(site):
    site.install_backend("alpha")
    site.install_backend("broken", module="raise RuntimeError('boom')")
    loaded, broken = registry.load_all("backend")
    assert set(loaded) == {"alpha"}
    assert set(broken) == {"broken"}
    assert "boom" in str(broken["broken"])


def test_load_all_keeps_both_sides_of_a_clash_apart(site):
    site.install_backend("alpha", distribution="one")
    site.install_backend("alpha", distribution="two")
    loaded, _ = registry.load_all("backend")
    assert set(loaded) == {"one:alpha", "two:alpha"}


def test_the_one_backend_that_claims_it_is_the_default_for_many(site):
    site.install_backend("solo")
    site.install_backend("many", "default_for_many = True")
    site.install_backend("broken", module="raise RuntimeError('boom')")
    assert registry.choose_default_backend().name == "many"


def test_no_default_for_many_says_how_to_get_one_and_what_is_broken(site):
    site.install_backend("solo")
    site.install_backend("broken", module="raise RuntimeError('boom')")
    with pytest.raises(PluginError) as caught:
        registry.choose_default_backend()
    text = str(caught.value)
    assert 'pip install "drivetrain[alpha]" or pip install "drivetrain[beta]"' in text
    assert "solo (solo-dist 1.0)" in text
    assert "boom" in text


def test_two_defaults_for_many_are_an_error_that_lists_them(site):
    site.install_backend("many", "default_for_many = True")
    site.install_backend("more", "default_for_many = True")
    with pytest.raises(PluginError, match=r"many \(many-dist 1.0\), more \(more-dist 1.0\); name one: backend: many"):
        registry.choose_default_backend()


PRESENT = "@classmethod\ndef present(cls): return True"
GENERIC = "generic = True"


def test_device_auto_takes_the_one_that_is_present(site):
    site.install_device("general", GENERIC)
    site.install_device("absent")
    site.install_device("vendor", PRESENT)
    entry, notes = registry.choose_device()
    assert (entry.name, notes) == ("vendor", [])


def test_device_auto_falls_back_to_the_generic_one_and_notes_what_is_broken(site):
    site.install_device("general", GENERIC)
    site.install_device("broken", module="raise RuntimeError('no driver')")
    site.install_device("asks", "@classmethod\ndef present(cls): raise OSError('lib missing')")
    entry, notes = registry.choose_device()
    assert entry.name == "general"
    assert len(notes) == 2
    assert "no driver" in notes[0]
    assert "device 'asks' (asks-dist 1.0) can't say whether it is present: OSError: lib missing" in notes[1]


def test_device_auto_with_two_present_lists_them_and_the_line_to_write(site):
    site.install_device("general", GENERIC)
    site.install_device("one", PRESENT)
    site.install_device("two", PRESENT)
    with pytest.raises(PluginError, match=r"one \(one-dist 1.0\), two \(two-dist 1.0\) .* device: one"):
        registry.choose_device()


def test_device_auto_without_a_generic_device_says_what_to_do(site):
    with pytest.raises(PluginError, match="pip install --force-reinstall drivetrain"):
        registry.choose_device()


# ---------------------------------------------------------------------------------------------------------- precisions


def _install_family(site) -> None:
    site.install_precision("tiny-b", "family = 'tiny'\nfamily_rank = 2")
    site.install_precision(
        "tiny-a",
        "family = 'tiny'\nfamily_rank = 1\n"
        "def refuses(self, capabilities, device_type):\n"
        "    return None if device_type == 'fast' else f'not on {device_type}'",
    )
    site.install_precision("tiny-c", "family = 'tiny'\nfamily_rank = 0\nneeds = frozenset({'magic'})")


def test_exact_precision_is_taken_as_named(site):
    _install_family(site)
    entry, notes = registry.resolve_precision("tiny-c", "cpu", Capabilities())
    assert (entry.name, notes) == ("tiny-c", [])


@pytest.mark.parametrize(
    ("device_type", "features", "chosen"),
    [("cpu", set(), "tiny-b"), ("fast", set(), "tiny-a"), ("cpu", {"magic"}, "tiny-c"), ("fast", {"magic"}, "tiny-c")],
)
def test_family_picks_its_first_member_that_works_here(site, device_type, features, chosen):
    _install_family(site)
    entry, notes = registry.resolve_precision("tiny", device_type, Capabilities(features=frozenset(features)))
    assert entry.name == chosen
    assert f"mixed_precision: tiny is precision {chosen!r}" in notes[-1]


def test_family_without_a_working_member_gives_each_reason(site):
    _install_family(site)
    site.install_precision("tiny-d", module="raise RuntimeError('no kernels')")
    site.directory.joinpath("fake_precision_tiny_b.py").write_text("raise RuntimeError('b is broken')")
    with pytest.raises(PluginError) as caught:
        registry.resolve_precision("tiny", "cpu", Capabilities(), where="c.yaml:2:18")
    text = str(caught.value)
    assert text.startswith("c.yaml:2:18: no member of the precision family 'tiny' works here")
    for reason in ("not on cpu", "needs what the backend does not offer: magic", "no kernels", "b is broken"):
        assert reason in text


def test_family_member_is_asked_with_its_configuration(site):
    site.install_precision(
        "tiny-a", "family = 'tiny'\ndef refuses(self, capabilities, device_type): return self.config"
    )
    with pytest.raises(PluginError, match="configured against it"):
        registry.resolve_precision(
            "tiny", "cpu", Capabilities(), configure=lambda entry, found: f"{entry.name} configured against it"
        )


def test_unknown_precision_is_not_found_and_shows_what_could_not_be_asked(site):
    site.install_precision("half")
    site.install_precision("broken", module="raise RuntimeError('boom')")
    with pytest.raises(PluginNotFoundError, match=r"no precision 'quarter'.*boom"):
        registry.resolve_precision("quarter", "cpu", Capabilities())
    with pytest.raises(PluginNotFoundError, match=r"no precision 'hlaf'; did you mean 'half'\?") as caught:
        registry.resolve_precision("hlaf", "cpu", Capabilities())
    assert "boom" not in str(caught.value)


def test_family_whose_members_all_lack_their_engines_is_refused_as_such(site):
    site.install_precision("tiny-a", "family = 'tiny'\nrequires = ('no-such-engine-xyz',)")
    reason = r"c.yaml:2:18: no member of the precision family 'tiny' works here.*needs no-such-engine-xyz"
    with pytest.raises(EngineError, match=reason):
        registry.find_precision("tiny", where="c.yaml:2:18")
    with pytest.raises(PluginError, match=reason) as caught:
        registry.resolve_precision("tiny", "cpu", Capabilities(), where="c.yaml:2:18")
    assert not isinstance(caught.value, PluginNotFoundError)
    site.install_precision("tiny-b", "family = 'tiny'")
    assert registry.find_precision("tiny") is None
