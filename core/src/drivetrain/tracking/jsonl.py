"""The tracker ``jsonl``: one line of JSON for each call of ``log``, in a file that any tool reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from drivetrain.tracking.tracker import GeneralTracker

__all__ = ["JsonlTracker"]


class JsonlTracker(GeneralTracker):
    """Write ``<logging_dir>/<run_name>/metrics.jsonl`` and ``config.json``; a run that goes on appends.

    Args:
        run_name: Name of the folder.
        logging_dir: Where it is.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__(run_name)
        self.folder = Path(logging_dir) / run_name
        self._file: IO[str] | None = None

    def start(self) -> None:
        """Open the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Line by line, so that what was logged is there whatever becomes of the process.
        self._file = (self.folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    @property
    def tracker(self) -> IO[str] | None:
        """The open file."""
        return self._file

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write ``config.json``; what JSON has no form for is written as text."""
        text = json.dumps(dict(values), indent=2, default=_plain)
        (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append ``{"step": ..., "time": ..., **values}``. The time is in seconds since 1970.

        Raises:
            TypeError: There are arguments that mean nothing here.
            ValueError: A value is called ``step`` or ``time``.
        """
        if kwargs:
            raise TypeError(f"the tracker {self.name!r} takes no further arguments; got {', '.join(kwargs)}")
        taken = sorted({"step", "time"} & set(values))
        if taken:
            raise ValueError(f"the tracker {self.name!r} writes {' and '.join(taken)} itself; rename the value")
        if self._file is None:
            raise ValueError(f"the tracker {self.name!r} was not started, or is finished")
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line, default=_plain) + "\n")

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    """Tensors and arrays as numbers, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
