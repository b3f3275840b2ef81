"""docs/vendors.md: thirty-one places where vendors differ, each with where it goes, and a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drivetrain import hookspecs
from drivetrain.plugin import Device

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "vendors.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| \d", line)]


def test_every_branch_point_has_its_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 32))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_is_there(row: list[str]) -> None:
    names = re.findall(r"`(\w+)`", row[2])
    known = {*hookspecs.hooks(), *dir(Device), "get_amp_supported_dtype", "is_bf16_supported", "manual_seed_all", "Run"}
    assert names or "core's own" in row[2] or "`" in row[2] or "plugin" in row[2]
    assert [name for name in names if name not in known] == []
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_vendor_*.py"))
    for name in re.findall(r"`([^`]+)`", row[3]):
        found = (ROOT / name).exists() if name.endswith(".py") else f"def {name}(" in tests
        assert found, f"row {row[0]} names {name}"
