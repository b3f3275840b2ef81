"""A file of Accelerate's that asks for XLA."""

from __future__ import annotations

import pytest

from drivetrain.config.migration import translate
from drivetrain.config.reader import parse
from drivetrain.config.resolved import Resolved
from drivetrain.config.values import Origin


@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_it_is_translated_into_this_backend(kind: str) -> None:
    text = f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\ndowncast_bf16: 'no'\nmixed_precision: bf16\n"
    file = parse(text, lambda mark: Origin("file", "old.yaml", mark.line + 1, mark.column + 1))
    assert file is not None
    found = translate(file)
    assert not found.missing
    assert Resolved(layers=(found.layer,)).run.backend == "xla"
