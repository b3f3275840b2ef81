"""Every hook of the contract is called, by core, on behalf of a plugin that implements all that its role may.

A plugin of each role is made from the contract itself, so a hook that is added and that nobody calls fails here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator, find_executable_batch_size, hookspecs, registry, set_seed, state
from drivetrain.collectives import broadcast
from drivetrain.config import resolve
from drivetrain.launch.script import ready, run
from drivetrain.operations import is_bf16_available

HOOKS = hookspecs.hooks()
SERVICES = {"reduce_ops"}
"""What core offers to backends and has no use for itself: asked here as they would, by ``run.hooks``."""
OF_SEVERAL = {"collectives", "join"}
"""Called where there are several processes: for all backends by the conformance kit, ``join`` by its group *data*."""
OTHERWISE = {"launch": "return 0", "compile_model": "return None"}
"""Bodies where core's default would start processes, or a compiler."""
MODULE = """
from drivetrain import defaults
from drivetrain.plugin import *

CALLED = []


class Every{kind}({kind}):
    '''Implements everything.'''

    api = (1, 0)
{policy}
{hooks}
"""
POLICY = "    policy = Policy(compute='bfloat16')\n"


def implementation(name: str) -> str:
    """A method that notes its call, and does what core does."""
    arguments = ", ".join(list(inspect.signature(getattr(hookspecs.HookSpecs, name)).parameters)[1:])
    body = OTHERWISE.get(name, f"return defaults.{name}({arguments})")
    return f"    @hookimpl\n    def {name}(self, {arguments}):\n        CALLED.append({name!r})\n        {body}\n"


def hooks_of(role: str) -> list[str]:
    return [name for name, info in HOOKS.items() if role in info.roles]


class Stream(IterableDataset[torch.Tensor]):
    """Five batches of which nobody knows beforehand that they are five."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(5, 2))


def use_everything(accelerator: Accelerator, folder: Path) -> None:
    """What a script may do, once."""
    set_seed(3)
    with accelerator.init_context():
        model: Any = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader: Any = DataLoader(Stream(), batch_size=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:  # the last group is shorter than was known, so its gradients are scaled
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).float().sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with accelerator.trigger_sync_in_backward(model):
        pass
    accelerator.gather_for_metrics(torch.ones(1))
    accelerator.reduce(torch.ones(1))
    broadcast(accelerator.run, torch.ones(1))
    accelerator.gather_for_metrics(["text"], use_gather_object=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    accelerator.run.hooks.broadcast_object(run=accelerator.run, value=1, source=0, group=None)
    is_bf16_available()
    with accelerator.profile():
        pass
    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=2)
    def fits(size: int) -> None:
        sizes.append(size)
        if size == 2:
            raise MemoryError("too much")

    fits()
    assert sizes == [2, 1]
    for name in SERVICES:
        getattr(accelerator.run.hooks, name)(run=accelerator.run)
    accelerator.free_memory()
    accelerator.end_training()


PREPARE = (
    *("convert_model", "move_model", "compile_backend", "compile_model", "prepare", "wrap_model", "wrap_optimizer"),
    *("wrap_loader", "wrap_scheduler", "after_prepare"),
)
START = (
    "launch_environment",
    "launch",
    "device",
    "compute_dtypes",
    "collectives",
    "init_world",
    "seed",
    "init_context",
)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fresh_run")
@pytest.mark.parametrize("role", ["backend", "device", "precision"])
def test_every_hook_of_a_role_is_called_and_in_the_order_of_the_contract(
    open_site: Any, tmp_path: Path, role: str
) -> None:
    kind = role.capitalize()
    source = MODULE.format(
        kind=kind,
        policy=POLICY if role == "precision" else "",
        hooks="\n".join(map(implementation, hooks_of(role))),
    )
    name = f"every-{role}"
    group = registry.GROUPS[role]
    open_site.install(
        name, entry_points={group: {name: f"every_{role}:Every{kind}"}}, modules={f"every_{role}": source}
    )
    chosen = {"device": "cpu", "mixed_precision": "fp16", {"precision": "mixed_precision"}.get(role, role): name}
    script = tmp_path / "script.py"
    script.write_text("")

    launched = {"DRIVETRAIN_HOME": str(tmp_path)}
    resolved = resolve(None, command_line=chosen, environment=launched)
    assert run(ready(resolved, str(script)), resolved)[0] == 0
    config = tmp_path / "config.yaml"
    compiled = "compile_model" in hooks_of(role)  # else core's default would compile
    config.write_text("".join(f"{key}: {value}\n" for key, value in {**chosen, "compile": compiled}.items()))
    accelerator = Accelerator(config_file=config, gradient_accumulation_steps=3)
    called = __import__(f"every_{role}").CALLED
    use_everything(accelerator, tmp_path)

    assert state.current() is None
    assert set(hooks_of(role)) - set(called) <= OF_SEVERAL
    for order in (START, PREPARE, ("accumulate", "backward", "clip_grad_norm", "step", "after_step", "zero_grad")):
        first = [called.index(hook) for hook in order if hook in called]
        assert first == sorted(first), [called[position] for position in sorted(first)]
    assert called[-1] == "shutdown"
