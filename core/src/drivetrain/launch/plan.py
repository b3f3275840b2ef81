"""What is to be started, on this machine and in the whole world: plain facts, and the arithmetic that checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from drivetrain.config.schema import field_names
from drivetrain.errors import ConfigError

if TYPE_CHECKING:
    from drivetrain.config import Resolved, RunConfig

__all__ = ["LaunchPlan", "contradictions", "plan_launch", "rendezvous_options"]


@attrs.frozen(kw_only=True)
class LaunchPlan:
    """What the launcher's hooks are given: the script, the numbers of processes, and the environment they get."""

    script: str
    """Path of a Python script, name of a module, or a program, as ``module`` and ``no_python`` say."""
    script_args: tuple[str, ...] = ()
    module: bool = False
    """Whether ``script`` names a module, as in ``python -m``."""
    no_python: bool = False
    """Whether ``script`` is a program that is run as it is."""
    processes: int | None = None
    """Processes on this machine; None until decided (only the hook ``process_count`` sees that)."""
    machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    """Port on machine 0; None: a free one, on one machine only."""
    max_restarts: int = 0
    monitor_interval: float = 0.1
    """Seconds between two looks at the processes."""
    tee: str = "none"
    """Which streams go to files as well as to the terminal: ``none``, ``stdout``, ``stderr`` or ``all``."""
    log_dir: str | None = None
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    environment: Mapping[str, str] = attrs.field(factory=dict)
    """Variables every process gets on top of the launcher's own environment, as plugins asked."""
    resolved_config: str | None = None
    """The file with the resolved configuration that workers read; its folder is the run's own."""
    backend: str | None = None
    """Name of the chosen backend; None while it depends on the number of processes."""
    device: str | None = None
    precision: str | None = None
    """The precision or family of precisions that was asked for."""
    quiet: bool = False
    """Whether only errors are reported."""
    config: RunConfig
    origins: Mapping[str, str] = attrs.field(factory=dict)
    """Where each key of core came from, for messages: ``{"mixed_precision": "train.yaml:3"}``."""

    @property
    def processes_total(self) -> int | None:
        """Processes over all machines; None until decided."""
        return None if self.processes is None else self.processes * self.machines

    @property
    def first_rank(self) -> int:
        """Rank of this machine's first process."""
        return self.machine_rank * (self.processes or 0)


def plan_launch(
    resolved: Resolved,
    script: str,
    script_args: Sequence[str] = (),
    *,
    module: bool = False,
    no_python: bool = False,
    quiet: bool = False,
) -> LaunchPlan:
    """Turn a resolved configuration into a plan. Touches nothing and starts nothing.

    Args:
        resolved: The configuration.
        script: What to run.
        script_args: Its arguments, handed on as they are.
        module: Whether ``script`` names a module.
        no_python: Whether ``script`` is a program of any kind.
        quiet: Whether only errors are reported.

    Raises:
        ConfigError: The numbers contradict each other; the text names the keys, where they were set, and the cure.
    """
    run = resolved.run
    if module and no_python:
        raise ConfigError("--module and --no_python exclude each other: a module is always run by Python")
    _check_address(resolved)
    _check_restarts(resolved)
    rendezvous_options(run.rdzv_conf)
    return LaunchPlan(
        script=script,
        script_args=tuple(script_args),
        module=module,
        no_python=no_python,
        processes=_processes_here(resolved),
        machines=run.num_machines,
        machine_rank=run.machine_rank,
        main_process_ip=run.main_process_ip,
        main_process_port=run.main_process_port or None,
        max_restarts=run.max_restarts,
        monitor_interval=run.monitor_interval,
        # A folder for logs with no stream named means all of them: the folder would stay empty otherwise.
        tee="all" if run.log_dir is not None and run.tee == "none" else run.tee,
        log_dir=run.log_dir,
        rdzv_backend=run.rdzv_backend,
        rdzv_conf=run.rdzv_conf,
        backend=run.backend,
        device=run.device,
        precision=run.mixed_precision,
        quiet=quiet,
        config=run,
        origins={name: str(resolved.origin(name)) for name in field_names()},
    )


def contradictions(resolved: Resolved) -> list[str]:
    """A message for each pair of settings that no launch could follow, whatever is added to them.

    Where machines meet is not asked for: each may be told on its own command line.
    """
    found = []
    for check in (_processes_here, _check_restarts, lambda resolved: rendezvous_options(resolved.run.rdzv_conf)):
        try:
            check(resolved)
        except ConfigError as error:
            found.append(str(error))
    return found


def _processes_here(resolved: Resolved) -> int | None:
    run = resolved.run
    if run.num_processes is None:
        return None
    if run.num_processes % run.num_machines:
        fitting = [n for n in (run.num_processes // run.num_machines, run.num_processes // run.num_machines + 1) if n]
        raise ConfigError(
            f"num_processes={run.num_processes} ({resolved.origin('num_processes')}) is the total over all machines "
            f"and can't be shared out evenly over num_machines={run.num_machines} "
            f"({resolved.origin('num_machines')}); use {' or '.join(str(n * run.num_machines) for n in fitting)}"
        )
    return run.num_processes // run.num_machines


def _check_address(resolved: Resolved) -> None:
    """Several machines must know where to meet; one machine meets itself."""
    run = resolved.run
    if run.num_machines == 1:
        return
    where = f"num_machines={run.num_machines} ({resolved.origin('num_machines')})"
    if run.main_process_ip is None:
        raise ConfigError(f"{where} needs main_process_ip: the address of machine 0, the same on all machines")
    if not run.main_process_port:
        raise ConfigError(
            f"{where} needs main_process_port: a port that is free on machine 0, the same on all machines. Only a "
            f"single machine can choose a free one itself"
        )


def _check_restarts(resolved: Resolved) -> None:
    run = resolved.run
    if run.max_restarts and run.num_machines > 1 and run.rdzv_backend == "static":
        raise ConfigError(
            f"max_restarts={run.max_restarts} ({resolved.origin('max_restarts')}) over several machines needs a "
            f"rendezvous that machines can join again: rdzv_backend: c10d instead of static"
        )


def rendezvous_options(text: str) -> dict[str, str]:
    """Parse ``rdzv_conf``: ``key=value`` pairs, separated by commas.

    Raises:
        ConfigError: A part is no such pair, or a key comes twice.
    """
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"rdzv_conf: {part!r} is no key=value pair (several are separated by commas)")
        if key.strip() in options:
            raise ConfigError(f"rdzv_conf: {key.strip()!r} is given twice")
        options[key.strip()] = value.strip()
    return options
