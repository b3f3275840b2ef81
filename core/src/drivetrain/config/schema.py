"""The core's own settings. Sections of plugins are attrs classes of theirs, built the same way.

Each field's metadata has ``help``: one sentence, with the unit, for ``--help`` and the documentation. ``accepts`` is
the type of what may be written, where a converter makes something else of it. ``world`` marks the settings that
describe the world of processes: once there are processes, those who started them have the last word on these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

__all__ = ["CompileConfig", "RunConfig", "field_names", "help_text", "world_keys"]


_MOST = 1 << 20
"""Processes of a run, and machines. Who writes a larger number has mistyped it, and would learn of it late."""


def _about(help: str, *, accepts: Any = None, world: bool = False) -> dict[str, Any]:
    return {"help": help, "world": world, **({} if accepts is None else {"accepts": accepts})}


def _between(low: float, high: float | None = None) -> Callable[..., None]:
    """A number of at least ``low`` and, if given, at most ``high``. None passes: the type decides whether it may be."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
        if value is None or (low <= value and (high is None or value <= high)):
            return
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{attribute.name} must be {bounds}, got {value}")

    return check


def _at_most(high: int) -> Callable[..., None]:
    def check(_: Any, attribute: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None and value > high:
            raise ValueError(f"{attribute.name} must be at most {high}, got {value}")

    return check


def _seconds(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{attribute.name} must be a finite number of seconds above 0, got {value}")


def _some_text(_: Any, attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value == "":
        raise ValueError(f"{attribute.name} must not be empty; null is the default")


def _gpu_ids(value: str | int | list[int]) -> str | list[int]:
    """A number, a list or comma-separated numbers as a list; ``"all"`` stays as written."""
    if isinstance(value, int):
        return [value]
    if isinstance(value, str) and value and all(part.strip().isdecimal() for part in value.split(",")):
        return [int(part) for part in value.split(",")]
    return value


def _device_numbers(_: Any, attribute: attrs.Attribute[Any], value: str | list[int]) -> None:
    # A number may come twice: processes can share a device, with collectives that allow it.
    if not value:
        raise ValueError(f"{attribute.name} must name at least one device, or be 'all'")
    if value != "all" and (isinstance(value, str) or min(value) < 0):
        raise ValueError(f"{attribute.name} must be 'all' or numbers from 0, got {value!r}")


@attrs.frozen(kw_only=True)
class CompileConfig:
    """Settings of ``torch.compile`` for prepared models."""

    backend: str | None = attrs.field(
        default=None, metadata=_about("Compiler that torch.compile uses; null: the device's own.")
    )
    mode: str | None = attrs.field(
        default=None, metadata=_about("Preset of the compiler, such as default, reduce-overhead or max-autotune.")
    )
    fullgraph: bool = attrs.field(
        default=False, metadata=_about("Whether a part that can't be compiled is an error instead of a graph break.")
    )
    dynamic: bool | None = attrs.field(
        default=None, metadata=_about("Whether to compile for changing shapes; null: once a shape has changed.")
    )
    options: dict[str, Any] | None = attrs.field(
        default=None, metadata=_about("Options for the compiler itself; excludes mode.")
    )

    def __attrs_post_init__(self) -> None:
        if self.mode is not None and self.options is not None:
            raise ValueError("mode and options exclude each other")


def _compile(value: CompileConfig | bool | None) -> CompileConfig | None:
    if isinstance(value, bool):
        return CompileConfig() if value else None
    return value


@attrs.frozen(kw_only=True)
class RunConfig:
    """The core's settings of a run, resolved and checked. In the order in which documentation lists them."""

    backend: str | None = attrs.field(
        default=None,
        metadata=_about("How the model is distributed: an installed backend; null: chosen by the number of processes."),
    )
    mixed_precision: str = attrs.field(
        default="no", metadata=_about("Number formats: no, fp16, bf16 or any installed precision.")
    )
    device: str = attrs.field(
        default="auto", metadata=_about("What the model runs on: auto, cpu or any installed device.")
    )
    num_processes: int | None = attrs.field(
        default=None,
        validator=[_between(1), _at_most(_MOST)],
        metadata=_about(
            "Number of processes, over all machines; null: one for each device of this machine.", world=True
        ),
    )
    num_machines: int = attrs.field(
        default=1, validator=[_between(1), _at_most(_MOST)], metadata=_about("Number of machines.", world=True)
    )
    machine_rank: int = attrs.field(
        default=0, validator=_between(0), metadata=_about("Number of this machine, counted from 0.", world=True)
    )
    main_process_ip: str | None = attrs.field(
        default=None,
        validator=_some_text,
        metadata=_about("Address of machine 0, reachable from the others; null on one machine.", world=True),
    )
    main_process_port: int | None = attrs.field(
        default=None,
        validator=_between(0, 65535),
        metadata=_about("Port on machine 0; null or 0: a free one, on one machine only.", world=True),
    )
    gpu_ids: str | list[int] = attrs.field(
        default="all",
        validator=_device_numbers,
        converter=_gpu_ids,
        metadata=_about(
            "Which devices of this machine are used: all, one number or a list such as 0,1.",
            accepts=str | int | list[int],
        ),
    )
    gradient_accumulation_steps: int = attrs.field(
        default=1,
        validator=_between(1),
        metadata=_about("Number of micro-batches whose mean gradient makes one update."),
    )
    collective_timeout: float | None = attrs.field(
        default=None,
        validator=_seconds,
        metadata=_about("Seconds a rank waits for the others in a collective; null: the backend's own limit."),
    )
    collectives: str | None = attrs.field(
        default=None,
        validator=_some_text,
        metadata=_about("Communication library, by torch's name for it; null: the device's own."),
    )
    init_method: str | None = attrs.field(
        default=None,
        validator=_some_text,
        metadata=_about("URL at which the processes meet, as torch takes it; null: where the launcher says."),
    )
    check_collectives: bool = attrs.field(
        default=True,
        metadata=_about("Whether gathered or reduced structures, shapes and dtypes are compared over ranks first."),
    )
    debug: bool = attrs.field(default=False, metadata=_about("Whether errors are shown with all of their tracebacks."))
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = attrs.field(
        default=None, metadata=_about("Lowest level of the library's own log messages; null: Python's logging decides.")
    )
    max_restarts: int = attrs.field(
        default=0, validator=_between(0), metadata=_about("How often all processes are restarted after a failure.")
    )
    monitor_interval: float = attrs.field(
        default=0.1, validator=_seconds, metadata=_about("Seconds between two looks at the processes.")
    )
    tee: Literal["none", "stdout", "stderr", "all"] = attrs.field(
        default="none", metadata=_about("Which output of the processes goes to the terminal and to a file in log_dir.")
    )
    log_dir: str | None = attrs.field(
        default=None,
        validator=_some_text,
        metadata=_about("Folder for the output of each process; null: terminal only."),
    )
    rdzv_backend: str = attrs.field(
        default="static", metadata=_about("How machines find each other: static, c10d or etcd.")
    )
    rdzv_conf: str = attrs.field(
        default="", metadata=_about("More settings of the rendezvous: key=value, separated by commas.")
    )
    compile: CompileConfig | None = attrs.field(
        default=None,
        converter=_compile,
        metadata=_about(
            "Settings of torch.compile for prepared models; true: its defaults; null: no compilation.",
            accepts=CompileConfig | bool | None,
        ),
    )

    def __attrs_post_init__(self) -> None:
        if self.machine_rank >= self.num_machines:
            raise ValueError(
                f"machine_rank must be below num_machines, got {self.machine_rank} of {self.num_machines}: "
                "machines are numbered from 0"
            )


def field_names() -> tuple[str, ...]:
    """The core's keys, in order."""
    return tuple(field.name for field in attrs.fields(RunConfig))


def world_keys() -> frozenset[str]:
    """The core's keys that describe the world of processes."""
    return frozenset(field.name for field in attrs.fields(RunConfig) if field.metadata["world"])


def help_text(key: str) -> str:
    """One sentence on a core key."""
    fields: Mapping[str, attrs.Attribute[Any]] = attrs.fields_dict(RunConfig)
    return str(fields[key].metadata["help"])
