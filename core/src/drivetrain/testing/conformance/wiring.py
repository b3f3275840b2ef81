"""Group *wiring*: what ``prepare`` returns fits together."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from drivetrain.testing.conformance.checks import CheckList, Violation, expect
from drivetrain.testing.conformance.recipes import WIDTH, Samples, full_weights, mlp
from drivetrain.testing.conformance.subject import Subject
from drivetrain.testing.conformance.training import grouped, tied

__all__ = ["checks"]

checks = CheckList("wiring")


@attrs.frozen
class Wired:
    """What one rank found in the objects that ``prepare`` returned."""

    kinds: list[str]
    same: list[str]
    """Objects that are others when they are prepared again."""
    names: list[str]
    optimizer: str
    """Class of the optimizer inside the prepared one."""
    strangers: int
    """Parameters of the optimizer that are none of the model's."""
    forgotten: list[str]
    """Trainable parameters of the model that are in no group of the optimizer."""
    members: list[int]
    """Parameters in each group of the optimizer."""
    devices: set[str]
    local: int
    """Elements of parameters that this rank holds."""


def wire() -> Wired:
    """Prepare one of everything, and look at it."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = mlp()
    optimizer = grouped(model)
    scheduler = StepLR(optimizer, 1)
    loader = DataLoader(Samples(WIDTH * accelerator.run.world.data_size), batch_size=WIDTH)
    made = accelerator.prepare(loader, optimizer, "text", model, scheduler)
    prepared: dict[str, Any] = {"loader": made[0], "optimizer": made[1], "model": made[3], "scheduler": made[4]}
    again = {name: accelerator.prepare(thing) for name, thing in prepared.items()}
    inner = accelerator.unwrap_model(prepared["model"])
    parameters = dict(inner.named_parameters())
    ids = {id(parameter): name for name, parameter in parameters.items()}
    held = [[id(parameter) for parameter in group["params"]] for group in prepared["optimizer"].param_groups]
    flat = {key for group in held for key in group}
    return Wired(
        kinds=[kind(thing) for thing in made],
        same=[name for name, thing in prepared.items() if again[name] is not thing],
        names=list(parameters),
        optimizer=type(prepared["optimizer"].optimizer).__name__,
        strangers=sum(key not in ids for key in flat),
        forgotten=[name for key, name in ids.items() if key not in flat],
        members=[len(group) for group in held],
        devices={parameter.device.type for parameter in parameters.values()},
        local=sum(local_numel(parameter) for parameter in parameters.values()),
    )


def wired(subject: Subject) -> list[Wired]:
    """What each rank found. Looked at once for all checks of a world."""
    key = f"what prepare returns to {subject.size}"
    if key not in subject.shared:
        subject.shared[key] = subject.run(wire)
    found: list[Wired] = subject.shared[key]
    return found


def kind(thing: Any) -> str:
    """What it can be used as."""
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, Optimizer):
        return "optimizer"
    if hasattr(thing, "get_last_lr"):
        return "scheduler"
    return "loader" if hasattr(thing, "__iter__") and not isinstance(thing, str) else type(thing).__name__


def local_numel(parameter: torch.Tensor) -> int:
    """Elements of a parameter that are on this rank."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel()


def alone() -> str:
    """Kind of what ``prepare`` returns for one object."""
    from drivetrain import Accelerator

    return kind(Accelerator().prepare(mlp()))


@checks("prepare returns everything in the order it was given, and one thing alone as itself")
def order(subject: Subject) -> None:
    for found in wired(subject):
        expect(found.kinds, ["loader", "optimizer", "str", "model", "scheduler"], "kinds of what prepare returned")
    expect(subject.run(alone), ["model"] * subject.size, "what prepare returned for one model")


@checks("what was prepared is returned as it is when it is prepared again")
def idempotent(subject: Subject) -> None:
    for found in wired(subject):
        expect(found.same, [], "objects that became others when they were prepared again")


@checks("unwrap_model gives a module with the parameter names of the user's own")
def names(subject: Subject) -> None:
    for found in wired(subject):
        expect(found.names, [name for name, _ in mlp().named_parameters()], "names of the unwrapped model's parameters")


def users_optimizer(subject: Subject) -> str | None:
    """Why there is nothing to see in an optimizer: an engine's own may hold other views of what it trains."""
    found: list[Wired] = wired(subject)
    return None if found[0].optimizer == SGD.__name__ else f"the engine has its own optimizer, {found[0].optimizer}"


@checks("the optimizer holds the parameters that are trained, in the groups they were in", unclaimed=users_optimizer)
def members(subject: Subject) -> None:
    for rank, found in enumerate(wired(subject)):
        if found.strangers:
            raise Violation(
                f"on rank {rank} the optimizer holds {found.strangers} parameter(s) that are none of the prepared "
                f"model's: it would train something that is never used"
            )
        expect(found.forgotten, [], "parameters of the prepared model that are in no group of the optimizer")
        expect(found.members, [2, 2], "parameters in each group of the optimizer")


@checks("the model is on the device of the run")
def placed(subject: Subject) -> None:
    for found in wired(subject):
        expect(found.devices, {subject.facts.device}, "devices of the prepared model's parameters")


@checks("a rank holds a part of the parameters where sharding is claimed, and else all of them")
def shards(subject: Subject) -> None:
    whole = sum(parameter.numel() for parameter in mlp().parameters())
    held = [found.local for found in wired(subject)]
    if not subject.facts.capabilities.shards_params:
        expect(held, [whole] * subject.size, "parameter elements on each rank (shards_params is not claimed)")
    elif subject.size > 1 and (max(held) >= whole or sum(held) < whole):
        raise Violation(
            f"capabilities.shards_params is claimed, but ranks hold {held} of {whole} parameter elements: each should "
            f"hold a part, and all of them together the whole"
        )


def state_dict_of(which: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the full weights of a prepared model, without an optimizer."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(tied() if which == "tied" else mlp())
    return {name: tuple(value.shape) for name, value in full_weights(accelerator, model).items()}


@checks("the full state dict has the names and shapes of the user's module, for tied weights too")
def full_state(subject: Subject) -> None:
    for which, module in (("plain", mlp()), ("tied", tied())):
        right = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        expect(subject.run(state_dict_of, which)[0], right, f"names and shapes of the full state of a {which} model")


def stranger() -> None:
    """Prepare an optimizer of a model that is not prepared."""
    from drivetrain import Accelerator

    Accelerator().prepare(mlp(), SGD(mlp().parameters(), lr=0.1))


@checks(
    "an optimizer of a model that was never prepared is refused on all ranks",
    unclaimed=lambda subject: "one shard trains it like any other" if subject.facts.data_size == 1 else None,
)
def refuse_stranger(subject: Subject) -> None:
    subject.refuse(stranger, what="preparing an optimizer of a model that is not prepared")


def evaluate() -> list[float]:
    """Outputs of a prepared model that has no optimizer, without gradients."""
    from drivetrain import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(mlp()).eval()
    with torch.no_grad():
        output = model(Samples(WIDTH).x.to(accelerator.device))
    return [float(value) for value in output.float().mean(dim=0)]


@checks("a model without an optimizer can be prepared, and evaluated without gradients")
def evaluated(subject: Subject) -> None:
    with torch.no_grad():
        right = mlp()(Samples(WIDTH).x).mean(dim=0)
    for rank, found in enumerate(subject.run(evaluate)):
        wrong = float((torch.tensor(found) - right).norm() / right.norm())
        if not wrong <= subject.tolerance:
            raise Violation(f"outputs on rank {rank} deviate by {wrong:.1e}; {subject.tolerance:.1e} would be right")
