"""Wrong before anything runs: the class, its section, its rows for the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from broken_plugins import fails
from broken_plugins.right import Right

from drivetrain.plugin import Backend, Check, Known, hookimpl


@fails("the API version is a literal", "is computed")
class ComputedApi(Backend):
    """Claims whatever version the core has."""

    api = (lambda: (1, 0))()


@fails("the API version is a literal", "inherits api")
class InheritsApi(Right):
    """Was written for the version its base was written for."""


@fails("the class says in a sentence", "has no docstring")
class Undocumented(Backend):
    api = (1, 0)


@fails("an instance is hashable", "unhashable")
@attrs.define
class Unhashable(Backend):
    """An attrs class that compares its instances."""

    api = (1, 0)
    config: Any = None


@attrs.frozen
class Unhelpful:
    """A section of which nobody says what it is for."""

    level: int = 3


@fails("every setting has a default and a help text", "NoHelp.level has no help")
class NoHelp(Backend):
    """Has settings without help."""

    api = (1, 0)
    Config = Unhelpful


@attrs.frozen
class Demanding:
    """A section that must be given."""

    level: int = attrs.field(metadata={"help": "how much"})


@fails("every setting has a default and a help text", "NoDefault.level has no default")
@fails("its section can be left out", "can't be built from an empty section")
class NoDefault(Backend):
    """Can't do without its section."""

    api = (1, 0)
    Config = Demanding

    def __init__(self, config: Any = None) -> None:
        self.config = config


@attrs.frozen
class OneWay:
    """A section that turns what was written into something else."""

    level: int = attrs.field(default=3, converter=lambda value: value + 1, metadata={"help": "how much"})


@fails("its section can be left out", "are read back as")
class NoRoundTrip(Backend):
    """Its defaults can't be written down."""

    api = (1, 0)
    Config = OneWay


@fails("checks() never raises", "OSError: no such library")
class ChecksRaise(Backend):
    """Can't be examined by the doctor."""

    api = (1, 0)

    @classmethod
    def checks(cls) -> Iterable[Check]:
        raise OSError("no such library")


@fails("checks() never raises", "'fine'")
class ChecksAreTexts(Backend):
    """Gives the doctor something else than rows."""

    api = (1, 0)

    @classmethod
    def checks(cls) -> Iterable[Any]:
        return ["fine"]


@fails("every known defect names a check", "it brews coffee")
class KnowsNoCheck(Right):
    """Declares a defect that no check of the kit looks for."""

    api = (1, 0)
    known = (Known("it brews coffee", "no water"),)


@fails("hooks it implements are those of its role", "can't implement this hook")
class Meddles(Right):
    """Answers for the precision."""

    api = (1, 0)

    @hookimpl
    def precision_state(self) -> dict[str, Any]:
        return {}
