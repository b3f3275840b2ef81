"""The tracker ``tensorboard``: event files through torch's own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.tracking.tracker import GeneralTracker

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Write event files into ``<logging_dir>/<run_name>``.

    Args:
        run_name: Name of the folder.
        logging_dir: Where it is.
        **options: For ``torch.utils.tensorboard.SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True
    requires = ("tensorboard",)

    def __init__(self, run_name: str, logging_dir: str, **options: Any) -> None:
        super().__init__(run_name, **options)
        self.folder = Path(logging_dir) / run_name
        self._writer: Any = None

    def start(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), **self.options)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self._writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store numbers, texts and truth values as hyperparameters, and all settings as a text."""
        plain = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
        self._writer.add_hparams(plain, metric_dict={}, run_name=".")
        text = json.dumps(dict(values), indent=4, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))  # a block of code
        self._writer.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store numbers as scalars, texts as texts, and mappings of numbers as several scalars of one chart."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self._writer.add_scalars(name, dict(value), global_step=step, **kwargs)
            else:
                self._writer.add_scalar(name, value, global_step=step, **kwargs)
        self._writer.flush()

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store batches of images by name; ``kwargs`` as of ``SummaryWriter.add_images``."""
        for name, images in values.items():
            self._writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
