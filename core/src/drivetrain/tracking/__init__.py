"""Experiment trackers: where metrics go. Any number of them, found by entry point in the group ``drivetrain.trackers``.

``tracker`` is what a tracker subclasses, ``choosing`` which ones a run has, ``surface`` the Accelerator's part; the
others are the trackers that core brings.
"""

from __future__ import annotations

from drivetrain.tracking.choosing import choose
from drivetrain.tracking.tracker import GeneralTracker, NoTracker, on_main_process

__all__ = ["GeneralTracker", "NoTracker", "choose", "on_main_process"]
