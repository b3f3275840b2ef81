"""Optimizer state by parameter name instead of by position.

torch numbers parameters in the order of the groups, which another run may give in another order, or another backend cut
in other pieces. Names stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.bundle import ParameterName
from drivetrain.errors import CheckpointError

__all__ = ["by_name", "by_position", "plain_name"]

Names = Sequence[Sequence[ParameterName | None]]
"""For each group of an optimizer the names of its parameters, as ``Bundle.names`` has them."""


def plain_name(name: str) -> str:
    """A parameter's name without what compiling a part of the model put into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _labels(names: Names) -> list[list[str]]:
    """A text for each parameter: ``0.layer.weight`` for one of model 0."""
    return [
        [
            f"unnamed.{group}.{position}" if name is None else f"{name[0]}.{plain_name(name[1])}"
            for position, name in enumerate(members)
        ]
        for group, members in enumerate(names)
    ]


def by_name(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """An optimizer's state dict with names in place of numbers.

    Whatever else the optimizer keeps in its state dict is kept as it is.

    Args:
        state: As ``Optimizer.state_dict`` returns it. One of another form is passed through.
        names: Of its parameters, by group.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        return {"form": "own", "state": dict(state)}
    if [len(group["params"]) for group in groups] != [len(members) for members in names]:
        return {"form": "own", "state": dict(state)}
    labels = _labels(names)
    label_of = {
        number: label
        for group, members in zip(groups, labels, strict=True)
        for number, label in zip(group["params"], members, strict=True)
    }
    return {
        "form": "named",
        "groups": [{**group, "params": members} for group, members in zip(groups, labels, strict=True)],
        "parameters": {label_of[key]: value for key, value in state["state"].items() if key in label_of},
        "others": [(key, value) for key, value in state["state"].items() if key not in label_of],
        "extra": {key: value for key, value in state.items() if key not in ("state", "param_groups")},
    }


def by_position(saved: Mapping[str, Any], names: Names, optimizer: Any, owner: str) -> dict[str, Any]:
    """What ``by_name`` was given, for an optimizer that may hold its parameters in another order.

    Args:
        saved: What ``by_name`` returned.
        names: Of the parameters of the optimizer to be loaded, by group.
        optimizer: That optimizer.
        owner: What it is called in messages.

    Raises:
        CheckpointError: It has other groups or other parameters than the saved one, or is one of another kind.
    """
    if saved["form"] == "own":
        return dict(saved["state"])
    labels = _labels(names)
    groups = saved["groups"]
    if len(groups) != len(labels):
        raise CheckpointError(
            f"{owner} has {len(labels)} parameter group(s), but {len(groups)} were saved; make it with the same groups"
        )
    flat = [label for members in labels for label in members]
    _check_same_names({label for group in groups for label in group["params"]}, set(flat), owner)
    _check_same_settings(groups, optimizer, owner)
    numbers = {label: number for number, label in enumerate(flat)}
    return {
        **saved["extra"],
        "state": {numbers[label]: value for label, value in saved["parameters"].items()} | dict(saved["others"]),
        "param_groups": [
            # Names the optimizer itself keeps beside its parameters are in this run's order already.
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [numbers[label] for label in members]}
            for group, members in zip(groups, labels, strict=True)
        ],
    }


def _check_same_settings(groups: Sequence[Mapping[str, Any]], optimizer: Any, owner: str) -> None:
    """Refuse the state of another kind of optimizer, which torch would load and the next step fail of.

    Not by the class: that of an engine may take the place of torch's. Switches don't count, since torch adds new ones
    and fills them in itself.
    """
    numbers = [
        name
        for name, value in getattr(optimizer, "defaults", {}).items()
        if value is not None and not isinstance(value, (bool, str))
    ]
    lacking = sorted({name for group in groups for name in numbers if name not in group})
    if lacking:
        raise CheckpointError(
            f"{owner} does not fit the checkpoint: what was saved has no {', '.join(lacking)}, so it is the state of "
            f"another kind of optimizer"
        )


def _check_same_names(saved: set[str], present: set[str], owner: str) -> None:
    if saved == present:
        return
    parts = []
    if missing := sorted(present - saved):
        parts.append(f"nothing was saved for {_some(missing)}")
    if unknown := sorted(saved - present):
        parts.append(f"it does not hold {_some(unknown)}, which was saved")
    raise CheckpointError(f"{owner} does not fit the checkpoint: {'; '.join(parts)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
