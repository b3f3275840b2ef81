"""``python -m drivetrain`` is ``drivetrain``."""

from __future__ import annotations

from drivetrain.cli import main

if __name__ == "__main__":
    main(prog_name="drivetrain")
