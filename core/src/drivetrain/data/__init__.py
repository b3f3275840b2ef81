"""Loading data: who gets which samples, in which order, and where a loader stands.

``plan`` is the arithmetic, ``order`` the order of an epoch, ``indexed``, ``stream`` and ``dispatch`` three ways of
reading, ``loader`` what the user iterates, ``progress`` and ``skipping`` how it resumes, ``rows`` what metrics keep.
"""

from __future__ import annotations

from drivetrain.data.configuration import DataLoaderConfiguration
from drivetrain.data.dispatch import Collectives
from drivetrain.data.loader import DataLoaderDispatcher, DataLoaderShard, Gate
from drivetrain.data.preparing import prepare_loader
from drivetrain.data.rows import Rows
from drivetrain.data.skipping import skip_first_batches

__all__ = [
    "Collectives",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "Gate",
    "Rows",
    "prepare_loader",
    "skip_first_batches",
]
