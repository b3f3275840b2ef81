"""What is where in a checkpoint, and the manifest that says so.

The layout is the same for any number of processes: what belongs to the run is there once, what belongs to a rank has
the rank in its name. Numbers are positions in the order in which objects were prepared or registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
from attrs.validators import ge, instance_of, optional

from drivetrain.checkpoint.files import FileRecord, checksums, read_json, write_json
from drivetrain.errors import CheckpointError

__all__ = [
    "ACCUMULATION",
    "MANIFEST",
    "SCALER",
    "TOP_NAMES",
    "Manifest",
    "Thing",
    "custom",
    "gradients",
    "loader",
    "model",
    "model_extra",
    "now",
    "optimizer",
    "precision",
    "rng",
    "scheduler",
]

MANIFEST = "manifest.json"
FORMAT = "drivetrain-checkpoint"
VERSION = 1
"""Of the layout. One that this version could not read gets another number."""

TOP_NAMES = (
    MANIFEST,
    "models",
    "optimizers",
    "schedulers",
    "scaler.json",
    "accumulation.json",
    "custom",
    "loaders",
    "rng",
    "gradients",
    "precision",
)


def model(index: int) -> Path:
    """Directory of a model's weights."""
    return Path("models", str(index))


def model_extra(index: int) -> Path:
    """Stem of the entries of a model's state that are no tensors."""
    return Path("models", str(index), "extra_state")


def optimizer(index: int) -> Path:
    """Stem of an optimizer's state."""
    return Path("optimizers", str(index), "state")


def scheduler(index: int) -> Path:
    """Stem of a scheduler's state."""
    return Path("schedulers", str(index))


def custom(index: int) -> Path:
    """Stem of the state of an object the user registered."""
    return Path("custom", str(index))


def loader(index: int, rank: int) -> Path:
    """Stem of a loader's position."""
    return Path("loaders", str(index), _rank(rank))


def rng(rank: int) -> Path:
    """Stem of a rank's random number generators."""
    return Path("rng", _rank(rank))


def precision(rank: int) -> Path:
    """Stem of what a rank's precision has learnt."""
    return Path("precision", _rank(rank))


def gradients(rank: int) -> Path:
    """A rank's gradients of a group of micro-batches that was not finished."""
    return Path("gradients", f"{_rank(rank)}.safetensors")


SCALER = Path("scaler")
ACCUMULATION = Path("accumulation")


def _rank(rank: int) -> str:
    return f"rank_{rank:05}"


def now() -> str:
    """The time in UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@attrs.frozen
class Thing:
    """One object whose state is in the checkpoint."""

    kind: str = attrs.field(validator=instance_of(str))
    """Name of its class."""
    parameters: int | None = attrs.field(default=None, validator=optional(instance_of(int)))
    """How many parameters a model has."""
    saved: bool = attrs.field(default=True, validator=instance_of(bool))
    """False where a hook of the user's wrote it in a way of its own."""


@attrs.frozen(kw_only=True)
class Manifest:
    """What is in a checkpoint."""

    drivetrain: str = attrs.field(validator=instance_of(str))
    """Version that wrote it."""
    torch: str = attrs.field(validator=instance_of(str))
    created: str = attrs.field(validator=instance_of(str))
    processes: int = attrs.field(validator=[instance_of(int), ge(1)])
    data_size: int = attrs.field(validator=[instance_of(int), ge(1)])
    backend: str = attrs.field(validator=instance_of(str))
    precision: str = attrs.field(validator=instance_of(str))
    step: int = attrs.field(validator=[instance_of(int), ge(0)])
    """Micro-batches of the run so far."""
    iteration: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(0)]))
    """Number of an automatically named checkpoint."""
    models: list[Thing] = attrs.field(factory=list)
    optimizers: list[Thing] = attrs.field(factory=list)
    schedulers: list[Thing] = attrs.field(factory=list)
    loaders: list[Thing] = attrs.field(factory=list)
    custom: list[Thing] = attrs.field(factory=list)
    scaler: Thing | None = None
    files: Mapping[str, FileRecord] = attrs.field(factory=dict)
    """Every file but the manifest, by its path in the checkpoint."""

    def write(self, directory: Path) -> None:
        """Write it, as the last file of a checkpoint."""
        write_json(directory / MANIFEST, {"format": FORMAT, "version": VERSION, **attrs.asdict(self)}, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            CheckpointError: There is none, it is damaged, or of a format this version doesn't know.
        """
        path = directory / MANIFEST
        if not path.exists():
            raise CheckpointError(f"{directory} {_why_none(directory)}")
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no manifest of a checkpoint")
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{directory} was written by drivetrain {data.get('drivetrain')} in version {data.get('version')} of "
                f"the format; this drivetrain reads version {VERSION}. Upgrade it"
            )
        try:
            return cls._from(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = error.args[0] if error.args else ""  # attrs gives more than a text
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {what})") from error

    @classmethod
    def _from(cls, data: Mapping[str, Any]) -> Manifest:
        things = {
            name: [_known(Thing, thing) for thing in data[name]]
            for name in ("models", "optimizers", "schedulers", "loaders", "custom")
        }
        scaler = None if data["scaler"] is None else _known(Thing, data["scaler"])
        files = {_inside(name): _known(FileRecord, record) for name, record in data["files"].items()}
        made: Manifest = _known(cls, {**data, **things, "scaler": scaler, "files": files})
        return made

    def check_sizes(self, directory: Path, names: list[str]) -> None:
        """Make sure that files are there and as long as they were written.

        Raises:
            CheckpointError: One isn't; the text names it.
        """
        for name in names:
            path = directory / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{directory} is incomplete: {name} can't be found ({error.strerror}), but the manifest lists it"
                ) from error
            if size != self.files[name].size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes, but {self.files[name].size} were written"
                )

    def check_contents(self, directory: Path, names: list[str]) -> None:
        """Make sure that files have the checksums they were written with, which reads all of them.

        Raises:
            CheckpointError: One hasn't; the text names it.
        """
        for name, found in zip(names, checksums([directory / name for name in names]), strict=True):
            if found != self.files[name]:
                raise CheckpointError(f"{directory / name} is damaged: its checksum is not the one it was written with")


def _known(cls: Any, data: Mapping[str, Any]) -> Any:
    """An attrs object from those entries this version has fields for: a later one may write more."""
    return cls(**{field.name: data[field.name] for field in attrs.fields(cls) if field.name in data})


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the file {name!r} would be outside the checkpoint")
    return name


def _why_none(directory: Path) -> str:
    if not directory.exists():
        there = sorted(path.name for path in directory.parent.glob("*") if (path / MANIFEST).is_file())
        found = f"; checkpoints beside it: {', '.join(there)}" if there else ""
        return f"does not exist{found}"
    if not directory.is_dir():
        return "is no directory"
    return f"is no complete checkpoint: it has no {MANIFEST}, which is written last"
