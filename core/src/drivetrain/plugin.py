"""What a plugin author subclasses: three bases without behaviour, and the small frozen facts they declare.

This module is light on purpose (no torch): a plugin's entry point names a class in a module that must be importable
without its engine, so that listing, checking and choosing plugins costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import pluggy

if TYPE_CHECKING:
    import torch

__all__ = [
    "API",
    "Backend",
    "Capabilities",
    "Check",
    "Device",
    "Known",
    "KwargsHandler",
    "Migration",
    "Plugin",
    "Policy",
    "Precision",
    "hookimpl",
]

API = (1, 0)
"""Version of the contract this core speaks: (major, minor). A plugin of another major or a newer minor is refused."""

hookimpl = pluggy.HookimplMarker("drivetrain")
"""Marks a plugin's method as the implementation of the hook of the same name."""


def _torch_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


@attrs.frozen(kw_only=True)
class Policy:
    """The number formats of a run, as a precision plugin declares them.

    Dtypes are given by name (``"bfloat16"``), so that declaring a policy needs no torch.
    """

    compute: str | None = None
    """Dtype of matrix products in forward and backward; None leaves the model as it is."""
    converted: str | None = None
    """Dtype that operands are rounded to in layers which ``convert_model`` put in; None: they compute as all others."""
    reduce: str | None = None
    """Dtype in which gradients are reduced over ranks; None means the dtype of the gradients themselves."""
    output: str | None = "float32"
    """Dtype floating-point outputs of a prepared model are cast to; None leaves them in the compute dtype."""
    loss_scale: float | Literal["dynamic"] | None = None
    """None: no loss scaling. A number: that fixed scale. ``"dynamic"``: grow and back off."""
    scaler_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Keyword arguments for the gradient scaler (``init_scale``, ``growth_factor``, ...)."""

    @property
    def scaler_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make ``torch.amp.GradScaler`` scale losses as this policy says."""
        arguments = dict(self.scaler_options)
        if self.loss_scale != "dynamic":
            # One that never grows; that it does not shrink either is seen to where it is updated.
            arguments |= {"init_scale": float(self.loss_scale or 1.0), "growth_interval": 2**31 - 1}
        return arguments

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """``compute`` as a torch dtype."""
        return _torch_dtype(self.compute)

    @property
    def converted_dtype(self) -> torch.dtype | None:
        """``converted`` as a torch dtype."""
        return _torch_dtype(self.converted)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """``reduce`` as a torch dtype."""
        return _torch_dtype(self.reduce)

    @property
    def output_dtype(self) -> torch.dtype | None:
        """``output`` as a torch dtype."""
        return _torch_dtype(self.output)


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend can do, computed from its configuration. Core asks these facts, never the backend's name."""

    distributed_type: str = "NO"
    """What ``accelerator.distributed_type`` reports, in the vocabulary of existing scripts."""
    many_processes: bool = False
    """Whether it distributes over several processes at all."""
    one_process: bool = True
    """Whether it works with a single process. If not, one process runs core's defaults instead, with a log line."""
    process_group: bool = False
    """Whether it needs a process group even for one process."""
    native_dtypes: frozenset[str] = frozenset()
    """Compute dtypes the backend applies itself from ``run.policy``; for the others core enters autocast."""
    owns_scaler: bool = False
    """Whether the engine scales losses itself, so that core builds no gradient scaler."""
    moves_model: bool = False
    """Whether the engine puts the model on its device, so that core's ``move_model`` is left out."""
    shards_params: bool = False
    """Whether a rank holds only a part of the parameters."""
    max_models: int | None = None
    """How many models with trainable parameters one run may prepare; None: any number."""
    resharding: bool = False
    """Whether a checkpoint can be loaded with another number of processes."""
    uneven_inputs: bool = False
    """Whether ``join`` lets ranks train on different numbers of batches."""
    clip_norms: frozenset[float] | None = None
    """Norm types ``clip_grad_norm`` accepts; None: any."""
    clip_subsets: bool = True
    """Whether ``clip_grad_norm`` accepts a part of a model's parameters."""
    features: frozenset[str] = frozenset()
    """Open vocabulary a precision may ask for, such as ``"all_gather_extensions"``."""


@attrs.frozen
class Check:
    """One row of ``drivetrain doctor``."""

    name: str
    ok: bool | None
    """True: fine. False: broken. None: does not apply here."""
    detail: str = ""
    fix: str = ""


@attrs.frozen
class Known:
    """A defect its authors know of: a check of the conformance kit that a plugin fails, and why.

    The kit shows it as known instead of failed, and fails once the check passes.
    """

    check: str
    """Name of the check, as ``drivetrain conform`` prints it."""
    reason: str
    precision: str | None = None
    """Only with this precision; None: with any."""


_Target = str | Callable[[str], Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class Migration:
    """How a configuration file of Accelerate's writes a plugin's settings: a table for ``drivetrain config migrate``.

    A table and no function, so that the command can name every key that it has no answer for. Patterns are those of
    :mod:`fnmatch`, and are compared with values as they are written there, in small letters: ``"true"``, ``"full_*"``.
    Keys of this library are given in full, such as ``"my_backend.some_key"`` or ``"gradient_accumulation_steps"``.
    """

    section: str
    """Key of that file under which the settings stand."""
    keys: Mapping[str, _Target | Mapping[str, _Target | Mapping[str, Any]]]
    """What becomes of each key in that section: the key here that takes its value, or a function from the value's text
    to settings. Or patterns of the value, and for each of them one of these two, or settings that mean the same."""
    where: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Keys of that file, in full, each with patterns one of which it must match for this plugin to be meant. ``""``
    matches a key that is not there. A backend is chosen by its own ``distributed_type``."""
    notes: Mapping[str, str] = attrs.field(factory=dict)
    """For keys in that section that may have no counterpart: what to do instead."""


@attrs.frozen
class NoConfig:
    """The section of a plugin that has no settings."""


class Plugin:
    """What all three roles share. Subclass :class:`Backend`, :class:`Device` or :class:`Precision` instead.

    An instance belongs to one run and may keep that run's state. ``__init__`` must be cheap: the engine is imported
    in the hooks, and ``capabilities`` or ``policy`` are asked before any device is touched.
    """

    role: ClassVar[str]
    api: ClassVar[tuple[int, int]]
    """The contract version the plugin was written against. Write a literal, such as ``(1, 0)``."""
    Config: ClassVar[type] = NoConfig
    """attrs class of the plugin's section in the YAML; every field needs a default."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Requirements of the engine (PEP 508), checked against what is installed before the engine is imported."""
    known: ClassVar[tuple[Known, ...]] = ()
    """Defects that are known, for the conformance kit."""
    migration: ClassVar[Migration | None] = None
    """How people who come from Accelerate have written this plugin's settings; None: not at all."""

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    @classmethod
    def checks(cls) -> Iterable[Check]:
        """Rows for ``drivetrain doctor``. Must not raise and must not need a device."""
        return ()


class Backend(Plugin):
    """How the model is distributed."""

    role = "backend"
    default_for_many: ClassVar[bool] = False
    """Whether several processes get this backend when none is named. Exactly one installed backend may claim it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this instance, with its config, can do."""
        return Capabilities()

    def refuses(self, policy: Policy, device_type: str) -> str | None:
        """The reason why this backend can't compute as a policy says on that type of device; None if it can.

        Asked before anything is allocated, once the precision has found nothing wrong itself.
        """
        return None


class Device(Plugin):
    """What the model runs on."""

    role = "device"
    generic: ClassVar[bool] = False
    """Whether it stands for whatever torch itself reports. ``device: auto`` falls back to the one that does."""
    label: ClassVar[str] = "device"
    """What one of these is called in messages, such as ``"GPU"``."""
    engine_requires: ClassVar[Mapping[str, str]] = {}
    """Minimum versions of engines on this device, such as ``{"some-engine": ">=0.15.2"}``."""

    @classmethod
    def present(cls) -> bool:
        """Whether such hardware is usable here. Cheap, and must not initialise it. Asked for ``device: auto``."""
        return False


class Precision(Plugin):
    """Which number formats the model is computed in."""

    role = "precision"
    family: ClassVar[str | None] = None
    """Asking for a family (``mixed_precision: fp8``) picks its installed member that works on the device."""
    family_rank: ClassVar[int] = 0
    """Order in which members of a family are tried; the lowest first, after those whose section was given."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Backend ``features`` without which this precision refuses to run."""

    @property
    def policy(self) -> Policy:
        """The number formats, from this instance's config."""
        return Policy()

    def refuses(self, capabilities: Capabilities, device_type: str) -> str | None:
        """The reason why this precision can't work with that backend or device; None if it can.

        Asked before anything is allocated. ``device_type`` is the torch device type, such as ``"cpu"``.
        """
        return None


class KwargsHandler:
    """Settings given in code, ``Accelerator(kwargs_handlers=[...])``: one more source for a plugin's section.

    A subclass is an attrs class whose fields are fields of the section it names. Only fields that were given
    explicitly (anything but ``None``) take part, and they win over the YAML, as all arguments in code do.
    Handlers of plugins that are not selected have no effect, so that one script runs under every backend.
    """

    section: ClassVar[str]
    """Config section that the fields belong to."""
    selects: ClassVar[str | None] = None
    """Backend that passing this object also chooses; None: it only configures."""

    def values(self) -> dict[str, Any]:
        """The explicitly given fields, by the section's names."""
        given = {name: getattr(self, name) for name in attrs.fields_dict(type(self))}  # type: ignore[arg-type]
        return {name: value for name, value in given.items() if value is not None}

    def settings(self) -> dict[str, Any]:
        """The explicitly given fields as configuration keys: ``"section.field"``, or a key of core's own.

        Empty for handlers of core, which reads the object itself and gives it no section.
        """
        return {f"{self.section}.{name}": value for name, value in self.values().items()} if self.section else {}
