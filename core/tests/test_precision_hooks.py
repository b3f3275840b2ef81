"""What a precision may do beyond dtypes: a context that knows the model, learnt state, and modules of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, registry, state
from drivetrain.plugin import Capabilities

pytestmark = pytest.mark.usefixtures("fresh_run", "no_fsync")

TINY = """
seen = []

@property
def policy(self):
    return Policy(compute='bfloat16')

@hookimpl
def convert_model(self, model):
    model.inner, model.kept = type(model.inner)(), model.inner
    return model

@hookimpl
def restore_model(self, model):
    model.inner = model.kept
    return model

@hookimpl
def autocast(self, run, model):
    import contextlib
    self.seen.append(None if model is None else model.training)
    return contextlib.nullcontext()

@hookimpl
def precision_state(self, models):
    return {'learnt': len(self.seen), 'models': len(models)} if self.seen else {}

@hookimpl
def load_precision_state(self, models, state):
    self.loaded = dict(state)
"""

NATIVE = """
@property
def capabilities(self):
    return Capabilities(native_dtypes=frozenset({'bfloat16'}))
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.weight)


@pytest.fixture
def tiny(open_site: Any) -> Callable[..., Accelerator]:
    """Makes an Accelerator with a precision of the test's own."""
    open_site.install_precision("tiny", TINY)
    open_site.install_backend("native", NATIVE)
    return lambda **options: Accelerator(**{"cpu": True, "mixed_precision": "tiny", **options})


def plugin(accelerator: Accelerator) -> Any:
    return accelerator.run.hooks.plugin("precision")


@pytest.mark.parametrize("backend", ["single", "native"])
def test_the_context_of_forward_knows_the_model(tiny: Any, backend: str) -> None:
    """Under a backend that is native in the compute dtype too: that is not all there may be in it."""
    accelerator = tiny(backend=backend)
    model = accelerator.prepare(Net())
    plugin(accelerator).seen.clear()
    model(torch.ones(2))
    model.eval()(torch.ones(2))
    with accelerator.autocast():
        pass
    assert plugin(accelerator).seen == [True, False, None]


def test_a_native_backend_needs_no_context_where_the_precision_has_none(open_site: Any) -> None:
    open_site.install_backend("native", NATIVE)
    model = Accelerator(cpu=True, backend="native", mixed_precision="bf16").prepare(Net())
    assert "forward" not in vars(model)


def test_unwrapping_without_the_wrapper_takes_converted_modules_back(tiny: Any) -> None:
    accelerator = tiny()
    given = Net()
    inner = given.inner
    model = accelerator.prepare(given)
    assert accelerator.unwrap_model(model).inner is not inner
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain.inner is inner
    assert "forward" not in vars(plain)


def saved(tiny: Any, folder: Path) -> None:
    accelerator = tiny()
    model = accelerator.prepare(Net())
    plugin(accelerator).seen.clear()
    model(torch.ones(2))
    accelerator.save_state(folder)
    state.reset()


def test_what_a_precision_has_learnt_is_saved_and_put_back(tiny: Any, tmp_path: Path) -> None:
    saved(tiny, tmp_path / "state")
    files = json.loads((tmp_path / "state" / "manifest.json").read_text())["files"]
    assert "precision/rank_00000.json" in files
    accelerator = tiny()
    accelerator.prepare(Net())
    accelerator.load_state(tmp_path / "state")
    assert plugin(accelerator).loaded == {"learnt": 1, "models": 1}


def test_what_another_precision_has_learnt_is_left_out_with_a_word(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tiny, tmp_path / "state")
    accelerator = tiny(mixed_precision="bf16")
    accelerator.prepare(Net())
    accelerator.load_state(tmp_path / "state")
    assert "saved with mixed_precision 'tiny', whose own state this run ('bf16') leaves out" in caplog.text


def test_a_precision_hears_of_a_load_without_state_too(tiny: Any, tmp_path: Path) -> None:
    """The weights are others afterwards."""
    accelerator = tiny(mixed_precision="bf16")
    accelerator.prepare(Net())
    accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state" / "precision").exists()
    state.reset()
    accelerator = tiny()
    accelerator.prepare(Net())
    accelerator.load_state(tmp_path / "state")
    assert plugin(accelerator).loaded == {}


# --------------------------------------------------------------------------------------------------------- families


def test_a_member_whose_section_is_given_is_tried_first(site: Any) -> None:
    for rank, name in enumerate(("first", "second", "third")):
        site.install_precision(name, f"family = 'small'\nfamily_rank = {rank}")
    chosen = [
        registry.resolve_precision("small", "cpu", Capabilities(), configured=configured)
        for configured in ((), ("third",), ("third", "second"))
    ]
    assert [entry.name for entry, _ in chosen] == ["first", "third", "second"]
    assert [notes[-1].rpartition(" here ")[2] for _, notes in chosen] == [
        "(first of those that work)",
        "(its section was given)",
        "(its section was given)",
    ]


def test_a_member_that_was_configured_but_cannot_work_here_is_passed_over(site: Any) -> None:
    site.install_precision("able", "family = 'small'")
    site.install_precision("unable", "family = 'small'\nneeds = frozenset({'magic'})")
    entry, notes = registry.resolve_precision("small", "cpu", Capabilities(), configured=("unable",))
    assert entry.name == "able"
    assert "precision 'unable' (unable-dist 1.0): it needs what the backend does not offer: magic" in notes


def test_the_choice_is_logged_with_its_reason(
    open_site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drivetrain")
    for rank, name in enumerate(("alpha-small", "beta-small")):
        open_site.install_precision(name, f"family = 'small'\nfamily_rank = {rank}")
    (tmp_path / "config.yaml").write_text("mixed_precision: small\nbeta-small: {}\n")
    monkeypatch.setenv("DRIVETRAIN_CONFIG", str(tmp_path / "config.yaml"))
    accelerator = Accelerator(cpu=True)
    assert accelerator.run.names["precision"] == "beta-small"
    assert (
        "mixed_precision: small is precision 'beta-small' (beta-small-dist 1.0) here (its section was given)"
        in caplog.text
    )
    Accelerator(mixed_precision="small")  # the same run
