"""The Accelerator's methods for saving and loading.

What they call is imported when they are called: importing the Accelerator would take a third longer for it, and most
processes that do never save.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.checkpoint import project
from drivetrain.checkpoint.agreement import agreed
from drivetrain.checkpoint.project import ProjectConfiguration, absolute
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.accumulation import Accumulation
    from drivetrain.gradients import Gradients
    from drivetrain.prepared import Prepared
    from drivetrain.world import Run

__all__ = ["CheckpointMixin"]

logger = logging.getLogger(__name__)

_Path = str | os.PathLike[str]
SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class CheckpointMixin:
    """Saving and loading, for the Accelerator."""

    run: Run
    known: Prepared
    gate: Accumulation
    gradients: Gradients
    scaler: Any
    project_configuration: ProjectConfiguration

    def _set_up_project(self, project_dir: Any, project_config: ProjectConfiguration | None) -> None:
        """Called once, by the Accelerator's constructor."""
        if project_config is not None and not isinstance(project_config, ProjectConfiguration):
            raise TypeError(f"project_config takes a ProjectConfiguration; got {type(project_config).__name__}")
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.registered: list[Any] = []
        """Objects of the user's that are saved too, in the order in which they were registered."""
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    # ------------------------------------------------------------------------------------------------- the project

    @property
    def project_dir(self) -> Any:
        """Directory of the project; None if there is none."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Directory for trackers; None if there is none."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def step(self) -> int:
        """Micro-batches of the run so far, those before it was resumed included."""
        return self.gate.batches

    # -------------------------------------------------------------------------------------------- the state of a run

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects with the state of the run.

        What the main process says of an object is saved, and loaded on every rank: what ranks count apart is to be
        reduced in ``state_dict``, which all of them call.

        Args:
            *objects: Anything with ``state_dict`` and ``load_state_dict``. Their number and order must be the same when
                the state is loaded.

        Raises:
            ValueError: Some lack one of the methods; nothing is registered then.
        """
        unfit = [
            f"{type(thing).__name__} (argument {position})"
            for position, thing in enumerate(objects)
            if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)))
        ]
        if unfit:
            raise ValueError(f"objects to be saved need state_dict and load_state_dict, unlike: {', '.join(unfit)}")
        for thing in objects:
            if not any(thing is other for other in self.registered):
                self.registered.append(thing)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before a state is saved, on every rank.

        Args:
            hook: ``models`` are the prepared models, ``weights`` their full state dicts. A state dict it takes out of
                ``weights`` is not saved: the hook saved the model itself. What it writes to ``output_dir`` becomes part
                of the checkpoint.

        Returns:
            A handle whose ``remove()`` takes the hook back.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before a state is loaded, on every rank.

        Args:
            hook: A model it takes out of ``models`` is not loaded: the hook loaded it itself.

        Returns:
            A handle whose ``remove()`` takes the hook back.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    @property
    def save_state_pre_hooks(self) -> list[SaveHook]:
        """The hooks, in the order in which they were registered."""
        return list(self._save_hooks.values())

    @property
    def load_state_pre_hooks(self) -> list[LoadHook]:
        """The hooks, in the order in which they were registered."""
        return list(self._load_hooks.values())

    def save_state(self, output_dir: _Path | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        """Save everything needed to go on with this run: all that was prepared or registered, and every generator.

        The checkpoint is complete or not there, whatever happens meanwhile. Every rank must call this.

        Args:
            output_dir: Directory of the checkpoint; a checkpoint that is there is replaced. None: the next number in
                ``project_dir/checkpoints``, with ``automatic_checkpoint_naming``.
            safe_serialization: Accepted for scripts that pass it; a state never holds pickled data.
            **options: None is known.

        Returns:
            The directory.

        Raises:
            CheckpointError: On every rank, if it failed on one; what was there before is still there.
            TypeError: There are options.
        """
        from drivetrain.checkpoint.bundles import leads
        from drivetrain.checkpoint.writer import save_checkpoint

        _refuse(options, "save_state")
        numbered = output_dir is None
        target = self._next_checkpoint() if output_dir is None else absolute(output_dir)
        lead = leads(self.run, not self.project_configuration.save_on_each_node)
        with agreed(self.run, f"saving to {target}"):
            if lead:
                _report_leftovers(target)
        save_checkpoint(self, target, self.save_iteration if numbered else None)  # type: ignore[arg-type]
        if numbered:
            self.project_configuration.iteration += 1
            if lead:
                self._prune(target)
        if self.run.world.rank == 0:
            logger.info("saved the state of the run to %s", target)
            self._report_loops_left_early()
        return target

    def _report_loops_left_early(self) -> None:
        for index, loader in enumerate(self.known.loaders):
            if (left_at := getattr(loader, "left_at", None)) is not None:
                logger.info(
                    "loader %d was left after %d batches of epoch %d, and is saved there: a run that loads this state "
                    "is given the rest first, while the next loop here begins epoch %d. loader.set_epoch(%d) before "
                    "saving makes both begin that",
                    *(index, left_at, loader.epoch, loader.epoch + 1, loader.epoch + 1),
                )

    def _next_checkpoint(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise CheckpointError(
                "save_state() needs a directory, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        target = self.project_configuration.next_checkpoint
        with agreed(self.run, f"saving to {target}"):
            if target.exists():
                raise CheckpointError(
                    f"{target} exists already, from another run: load_state() goes on from the last one there, "
                    f"ProjectConfiguration(iteration=...) sets the next number, another project_dir keeps runs apart"
                )
        return target

    def _prune(self, target: Path) -> None:
        limit = self.project_configuration.total_limit
        if limit is None:
            return
        try:
            project.prune(target.parent, limit, keep=target)
        except OSError as error:  # the new one is safe, so the run can go on
            logger.warning("can't delete old checkpoints in %s: %s", target.parent, error)

    def load_state(
        self,
        input_dir: _Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        strict: bool = True,
        verify: bool = True,
        **options: Any,
    ) -> Path:
        """Load what ``save_state`` saved into what was prepared and registered. Every rank must call this.

        Everything that can be checked is checked before anything is changed. Another number of processes is fine for
        all but the generators of ranks that were not there. Loaders go on where they were, in the same order, and their
        workers draw at random (for augmentations, say) what they would have.

        Args:
            input_dir: Directory of the checkpoint. None: the one with the highest number in
                ``project_dir/checkpoints``.
            load_kwargs: None is known.
            strict: Whether what is only in this run or only in the checkpoint is an error; if not, it is a warning, and
                the rest is loaded.
            verify: Compare the checksums of all files, so that weights that changed on the disk are an error. False
                leaves out those of tensors, which are read once more for it: next to nothing where they come from the
                disk, about 0.4 s a GB where the system has them in memory, shared by the ranks. Sizes and the checksums
                of all else are compared in any case.
            **options: ``map_location`` has no effect: values go where what they are loaded into is.

        Returns:
            The directory.

        Raises:
            CheckpointError: On every rank, if anything is missing, damaged or does not fit.
            TypeError: There are options that are not known.
        """
        from drivetrain.checkpoint.reader import load_checkpoint

        _refuse({**(load_kwargs or {}), **options}, "load_state", accepted=("map_location",))
        target = self._latest() if input_dir is None else absolute(input_dir)
        manifest = load_checkpoint(self, target, strict=strict, verify=verify)  # type: ignore[arg-type]
        if self.project_configuration.automatic_checkpoint_naming and self.project_dir is not None:
            self._go_on_counting(target, manifest.iteration)
        if self.run.world.rank == 0:
            logger.info("loaded the state of the run from %s (saved %s)", target, manifest.created)
        return target

    def _latest(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise CheckpointError(
                "load_state() needs a directory, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        directory, name = self.project_configuration.checkpoints, ""
        with agreed(self.run, "looking for the last checkpoint"):
            name = project.latest(directory).name
        # All must load the same one, while another process may be adding to them.
        common: str = self.run.hooks.broadcast_object(run=self.run, value=name, source=0, group=None)
        return directory / common

    def _go_on_counting(self, target: Path, iteration: int | None) -> None:
        """Never reuse a number: what was loaded may not be the last one there."""
        configuration = self.project_configuration
        following = configuration.iteration
        with agreed(self.run, "looking for the last checkpoint"):
            taken = [number for number, _ in project.numbered(configuration.checkpoints)]
            if iteration is not None and target.parent == configuration.checkpoints:
                taken.append(iteration)
            following = max([following, *(number + 1 for number in taken)])
        configuration.iteration = self.run.hooks.broadcast_object(run=self.run, value=following, source=0, group=None)

    # ------------------------------------------------------------------------------------------------------- weights

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict of a model, by the names its own module has.

        Every rank must call this where the backend shards parameters; complete at least on rank 0.

        Args:
            model: Prepared or not, or unwrapped from a prepared one.
            unwrap: False gives the wrapper's own state dict, with its names and only this rank's part.
        """
        from drivetrain.checkpoint.bundles import full_weights

        known = self.known.model_of(model)
        if known is not None and unwrap:
            return full_weights(self.run, known.wrapped)
        return dict(model.state_dict())

    def save_model(
        self,
        model: nn.Module,
        save_directory: _Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the full weights of a model, from the main process. Every rank must call this.

        Writes ``model.safetensors``, or several files with ``model.safetensors.index.json`` above ``max_shard_size``.
        Files of an earlier save in that directory are replaced.

        Args:
            model: Prepared or not; an unwrapped one gives the same files as the prepared one.
            save_directory: Made if it isn't there.
            max_shard_size: Largest size of a file's tensors, in bytes or as a text such as ``"500MB"``.
            safe_serialization: False writes ``pytorch_model.bin`` with ``torch.save``.

        Raises:
            CheckpointError: On the main process, if the weights can't be written.
            ValueError: ``max_shard_size`` is no size; on every rank, before anything is done.
        """
        from drivetrain.checkpoint.model_files import parse_size, write_model_files

        limit = parse_size(max_shard_size)
        known = self.known.model_of(model)
        wrapped = model if known is None else known.wrapped
        state = self.get_state_dict(wrapped)
        if not self._writes_weights:
            return
        bare = self.run.hooks.unwrap(run=self.run, model=wrapped)
        write_model_files(absolute(save_directory), state, module=bare, max_shard_size=limit, safe=safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object, from the main process: whole or not at all.

        Args:
            obj: Anything ``torch.save`` takes; for safetensors a dict of tensors.
            f: Path, or a file open for writing.
            safe_serialization: Write safetensors. A path that ends with ``.safetensors`` means it too.

        Raises:
            CheckpointError: The file can't be written, or the object is no dict of tensors.
        """
        if self._writes_weights:
            from drivetrain.checkpoint.objects import write_object

            write_object(obj, f, safe_serialization)

    @property
    def _writes_weights(self) -> bool:
        from drivetrain.checkpoint.bundles import leads

        return leads(self.run, not self.project_configuration.save_on_each_node)


def _refuse(options: Mapping[str, Any], method: str, accepted: tuple[str, ...] = ()) -> None:
    unknown = [name for name in options if name not in accepted]
    if unknown:
        raise TypeError(f"{method} takes no option {', '.join(map(repr, unknown))} under this backend")


def _report_leftovers(target: Path) -> None:
    from drivetrain.checkpoint.atomic import leftovers

    for left in leftovers(target):
        logger.warning("%s was left by a save that did not end; delete it unless one is running", left)
