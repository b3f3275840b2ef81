"""Saving and loading: the state of a whole run, or the weights of one model.

A checkpoint is a directory that is complete or not there. It is written under a temporary name beside its place, every
file is forced to the disk, and only then is it renamed. Nothing in it is ever unpickled: nested data is JSON, tensors
are safetensors, and what is neither is refused when it is saved.

::

    checkpoint_3/
      manifest.json                     what is in it: versions, world, objects, every file with size and checksum
      models/0/model.safetensors        full weights, by the names the user's own module has
      optimizers/0/state.json           state by parameter name, with state.safetensors for its tensors
      schedulers/0.json                 scaler.json, accumulation.json, custom/0.json: as they are named
      loaders/0/rank_00000.json         the position of a loader
      rng/rank_00000.json               Python's, numpy's, torch's and the device's generators
      gradients/rank_00000.safetensors  only where a group of micro-batches was not finished

Models and optimizers are written by the hook ``save_state``. Backends that shard may write there what each rank holds
(``sharded_files``), which core reads too, and ``merging`` makes whole weights of. All else is the same for all.
"""

from __future__ import annotations

from drivetrain.checkpoint.project import ProjectConfiguration

__all__ = ["ProjectConfiguration"]
