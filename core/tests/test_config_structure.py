"""Sections of plugins: every type, every message, all problems at once."""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import pytest

from drivetrain.config import Origin, Resolved
from drivetrain.config.layers import from_arguments
from drivetrain.config.reader import read_file
from drivetrain.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from fractions import Fraction

DEFAULTS = Resolved(layers=())


def section_of(tmp_path: pathlib.Path, text: str, cls: type[Any]) -> Any:
    """``cls`` built from the YAML of its section."""
    path = tmp_path / "c.yaml"
    path.write_text("part:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    return Resolved(layers=(read_file(str(path)),)).section("part", cls)


def problems_of(tmp_path: pathlib.Path, text: str, cls: type[Any]) -> list[str]:
    """Lines of the error, without the file's path and the head line."""
    with pytest.raises(ConfigError) as caught:
        section_of(tmp_path, text, cls)
    lines = str(caught.value).replace(f"{tmp_path / 'c.yaml'}:", "").splitlines()
    return [line.strip() for line in lines if "problems in the settings" not in line]


def one(kind: Any, default: Any = None) -> Any:
    """An attrs class with one field ``x`` of a type."""
    return attrs.make_class("One", {"x": attrs.field(default=default, type=kind)})


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen
class Inner:
    size: int = 1
    names: list[str] = attrs.field(factory=list)


@attrs.frozen
class Outer:
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: dict[str, Inner] = attrs.field(factory=dict)
    ratio: float = attrs.field(default=0.5, validator=attrs.validators.le(1.0))
    mode: Literal["none", "full", "no"] = "none"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (str, "x: no", "no"),
        (str, "x: Off", "Off"),
        (str, "x: 'no'", "no"),
        (str, 'x: "4"', "4"),
        (str, "x: 2020-01-01", "2020-01-01"),
        (str, "x: |\n    several\n    lines", "several\nlines\n"),
        (str | None, "x: null", None),
        (str | None, "x:", None),
        (int, "x: 4", 4),
        (float, "x: 4", 4.0),
        (float, "x: 1e-5", 1e-5),
        (float, "x: 1.0e-5", 1e-5),
        (bool, "x: no", False),
        (bool, "x: true", True),
        (Literal["no", "yes", "bf16"], "x: no", "no"),
        (Literal["on", "off"], "x: off", "off"),
        (Literal[0, 1, 2], "x: 2", 2),
        (Literal["auto"] | float, "x: 1e3", 1000.0),
        (Literal["auto"] | float, "x: auto", "auto"),
        (int | str, "x: all", "all"),
        (int | str, "x: 4", 4),
        (list[str], "x: [no, on]", ["no", "on"]),
        (list[int] | None, "x: [1, 2]", [1, 2]),
        (str | list[int], "x: [1]", [1]),
        (tuple[int, ...], "x: [1, 2]", (1, 2)),
        (tuple[float, float], "x: [0.9, 1]", (0.9, 1.0)),
        (set[str], "x: [a, b, a]", {"a", "b"}),
        (frozenset[int], "x: [1]", frozenset({1})),
        (Sequence[int], "x: [1]", [1]),
        (dict[str, int], "x: {a: 1}", {"a": 1}),
        (dict[int, str], "x: {0: a}", {0: "a"}),
        (Mapping[str, Any], "x: {a: [1, {b: no}]}", {"a": [1, {"b": False}]}),
        (pathlib.Path, "x: a/b", pathlib.Path("a/b")),
        (Color, "x: red", Color.RED),
        (Any, "x: 1e-5", 1e-5),
        (Inner, "x: {size: 3}", Inner(size=3)),
        (Inner | None, "x:", None),
        (Inner | bool, "x: true", True),
    ],
)
def test_what_fits_its_type_is_read(tmp_path: pathlib.Path, kind: Any, text: str, value: Any) -> None:
    read = section_of(tmp_path, text, one(kind)).x
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (str, "x: 4", '2:6: part.x: expected text, got the number 4; put it in quotes: "4"'),
        (str, "x: 1.10", 'expected text, got the number 1.10; put it in quotes: "1.10"'),
        (str, "x: null", "expected text, got null"),
        (str, "x:", "expected text, got nothing"),
        (str, "x: [a]", "expected text, got the list [a]"),
        (int, "x: 4.0", "expected a whole number, got the number 4.0"),
        (int, "x: true", "expected a whole number, got true"),
        (int, "x: no", "expected a whole number, got no"),
        (int, "x: '4'", "expected a whole number, got the text '4'; leave out the quotes"),
        (int, "x: 010", "expected a whole number, got the text '010'; write it without leading zeros"),
        (float, "x: '1e-5'", "expected a number, got the text '1e-5'; leave out the quotes"),
        (float, "x: yes", "expected a number, got yes"),
        (float, f"x: 1{'0' * 99}", None),
        (bool, "x: 1", "expected true or false, got the number 1"),
        (bool, "x: 'true'", "expected true or false, got the text 'true'; leave out the quotes"),
        (bool, "x: maybe", "expected true or false, got the text 'maybe'"),
        (Literal["fp16", "bf16"], "x: bf61", "is not a choice; did you mean 'bf16'? Choices: fp16, bf16"),
        (Literal[1, 2], "x: true", "true is not a choice. Choices: 1, 2"),
        (Color, "x: bleu", "is not a choice; did you mean 'blue'? Choices: red, blue"),
        (int | None, "x: many", "2:6: part.x: expected a whole number, got the text 'many'"),
        (int | bool, "x: many", "expected a whole number or true or false, got the text 'many'"),
        (list[int], "x: 3", "expected a list, such as [a, b], got the number 3"),
        (list[int], "x: [1, b]", "2:10: part.x[1]: expected a whole number, got the text 'b'"),
        (str | list[int], "x: [1, b]", "part.x[1]: expected a whole number"),
        (tuple[int, int], "x: [1]", "expected a list of 2, got 1"),
        (set[Any], "x: [[1]]", "must be scalars"),
        (dict[str, int], "x: {a: b}", "part.x.a: expected a whole number"),
        (dict[int, int], "x: {a: 1}", "part.x (its key 'a'): expected a whole number"),
        (dict[str, int], "x: [1]", "expected a mapping, such as {key: value}, got the list [1]"),
        (Inner, "x: 3", "expected a mapping with keys of Inner, got the number 3"),
        (Inner, "x: {sise: 3}", "2:7: part.x.sise: unknown key; did you mean 'size'?"),
        (Inner | None, "x: {size: a}", "2:13: part.x.size: expected a whole number"),
        (Callable[[int], int], "x: abs", "can't be written here; give it in code"),
        (list[None], "x: [3]", "expected null, got the number 3"),
    ],
)
def test_what_does_not_fit_is_refused_with_position_and_cure(
    tmp_path: pathlib.Path, kind: Any, text: str, message: str | None
) -> None:
    if message is None:  # large, but a float
        assert section_of(tmp_path, text, one(kind)).x == 1e99
        return
    (problem,) = problems_of(tmp_path, text, one(kind))
    assert problem.startswith("2:")
    assert message in problem


def test_one_error_lists_every_problem_of_a_section_in_nested_tables_too(tmp_path: pathlib.Path) -> None:
    text = "inner:\n  size: big\n  nmes: [a]\nmany: {a: {size: 1.5}}\nratio: 3\nmode: ful\nextra: 1"
    assert problems_of(tmp_path, text, Outer) == [
        "3:11: part.inner.size: expected a whole number, got the text 'big'",
        "4:5: part.inner.nmes: unknown key; did you mean 'names'?",
        "5:20: part.many.a.size: expected a whole number, got the number 1.5",
        "6:10: part.ratio: must be <= 1.0: 3.0",
        "7:9: part.mode: the text 'ful' is not a choice; did you mean 'full'? Choices: none, full, no",
        "8:3: part.extra: unknown key; known: inner, maybe, many, ratio, mode",
    ]


def test_an_absent_or_empty_section_is_all_defaults(tmp_path: pathlib.Path) -> None:
    assert DEFAULTS.section("part", Outer) == Outer()
    assert section_of(tmp_path, "", Outer) == Outer()


def test_a_validators_text_stands_at_the_value_it_refuses(tmp_path: pathlib.Path) -> None:
    assert problems_of(tmp_path, "mode: no\nratio: 1.5", Outer) == ["3:10: part.ratio: must be <= 1.0: 1.5"]


@attrs.frozen
class Ranges:
    low: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    high: int = attrs.field(default=10, validator=attrs.validators.instance_of(int))
    step: int = attrs.field(default=1)

    @step.validator
    def _positive(self, attribute: Any, value: int) -> None:
        if value <= 0:
            raise ValueError("one has to get ahead")

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")


def test_several_validators_are_reported_each_at_its_key(tmp_path: pathlib.Path) -> None:
    assert problems_of(tmp_path, "low: -1\nhigh: 5\nstep: 0", Ranges) == [
        "2:8: part.low: must be >= 0: -1",
        "4:9: part.step: one has to get ahead",
    ]


def test_a_validator_is_heard_beside_a_wrong_type(tmp_path: pathlib.Path) -> None:
    assert problems_of(tmp_path, "low: -1\nhigh: many\nstep: 0", Ranges) == [
        "2:8: part.low: must be >= 0: -1",
        "3:9: part.high: expected a whole number, got the text 'many'",
        "4:9: part.step: one has to get ahead",
    ]


def test_a_validator_that_looks_at_other_keys_waits_until_they_are_right(tmp_path: pathlib.Path) -> None:
    def below_high(instance: Any, attribute: Any, value: int) -> None:
        if value > instance.high:
            raise ValueError(f"low ({value}) is above high")

    cls = attrs.make_class(
        "Pair",
        {
            "low": attrs.field(type=int, default=0, validator=below_high),
            "high": attrs.field(type=int, default=10),
        },
    )
    assert problems_of(tmp_path, "low: 11\nhigh: many", cls) == [
        "3:9: part.high: expected a whole number, got the text 'many'"
    ]
    assert problems_of(tmp_path, "low: 11", cls) == ["2:8: part.low: low (11) is above high"]


def test_keys_that_contradict_each_other_are_reported_at_the_first_named(tmp_path: pathlib.Path) -> None:
    assert problems_of(tmp_path, "high: 3\nlow: 4", Ranges) == ["3:8: part.low: low (4) is above high (3)"]


def test_a_missing_mandatory_key_is_named(tmp_path: pathlib.Path) -> None:
    cls = attrs.make_class("Strict", {"a": attrs.field(type=int), "b": attrs.field(type=int, default=0)})
    assert problems_of(tmp_path, "b: 1", cls) == ["2:3: part: the key 'a' is missing"]
    assert section_of(tmp_path, "a: 1", cls).a == 1


def test_a_mandatory_keys_validator_is_reported_at_the_key(tmp_path: pathlib.Path) -> None:
    check = attrs.validators.ge(0)
    cls = attrs.make_class(
        "Strict", {"a": attrs.field(type=int, validator=check), "b": attrs.field(type=int, default=0)}
    )
    assert problems_of(tmp_path, "b: 1\na: -1", cls) == ["3:6: part.a: must be >= 0: -1"]


def test_private_attributes_are_written_without_underscore(tmp_path: pathlib.Path) -> None:
    cls = attrs.make_class("Private", {"_x": attrs.field(type=int, default=0)})
    assert section_of(tmp_path, "x: 3", cls)._x == 3


def test_accepts_in_the_metadata_replaces_the_annotation(tmp_path: pathlib.Path) -> None:
    field = attrs.field(type=int, default=0, converter=len, metadata={"accepts": list[int]})
    cls = attrs.make_class("Accepting", {"x": field})
    assert section_of(tmp_path, "x: [7, 8]", cls).x == 2


def test_a_bug_in_a_validator_is_no_config_error_and_names_the_section(tmp_path: pathlib.Path) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("oops")

    with pytest.raises(KeyError, match="oops") as caught:
        section_of(
            tmp_path, "x: 1", attrs.make_class("Buggy", {"x": attrs.field(type=int, default=0, validator=broken)})
        )
    notes = getattr(caught.value, "__notes__", [str(caught.value)])
    assert any("Buggy" in note and "part" in note for note in notes)


def test_a_class_without_attrs_or_with_hidden_types_is_the_plugins_fault() -> None:
    with pytest.raises(PluginError, match="no attrs class"):
        DEFAULTS.section("part", int)

    @attrs.frozen
    class Hidden:
        x: Fraction | None = None

    with pytest.raises(PluginError, match=r"Hidden can't be resolved.*Fraction"):
        DEFAULTS.section("part", Hidden)


def in_code(cls: type[Any], **values: Any) -> Any:
    layer = from_arguments({f"part.{key}": value for key, value in values.items()}, Origin("code"))
    return Resolved(layers=(layer,)).section("part", cls)


def test_objects_given_in_code_are_taken_as_they_are() -> None:
    inner = Inner(size=7)
    assert in_code(Outer, inner=inner).inner is inner
    assert in_code(one(Callable[[int], int]), x=abs).x is abs
    marker = object()
    assert in_code(one(Any), x=marker).x is marker
    assert in_code(one(tuple[int, ...]), x=[1, 2]).x == (1, 2)
    assert in_code(one(dict[int, str]), x={0: "a"}).x == {0: "a"}
    assert in_code(one(pathlib.Path), x=pathlib.Path("a")).x == pathlib.Path("a")
    assert in_code(one(list[Inner]), x=[inner, {"size": 8}]).x == [inner, Inner(size=8)]
    assert in_code(one(Color), x=Color.BLUE).x is Color.BLUE


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (str, False, "expected text, got false"),
        (str, 3, "expected text, got the number 3"),
        (int, True, "expected a whole number, got true"),
        (int, "3", "expected a whole number, got the text '3'"),
        (bool, 1, "expected true or false, got the number 1"),
        (float, 10**400, "is too large"),
        (Color, 3, "the number 3 is not a choice"),
        (int, object, "expected a whole number, got type"),
    ],
)
def test_types_are_as_strict_in_code(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        in_code(one(kind), x=value)
    assert str(caught.value).startswith("Accelerator(...): part.x: ")


def on_command_line(cls: type[Any], text: str) -> Any:
    layer = from_arguments({"part.x": text}, Origin("command line"))
    return Resolved(layers=(layer,)).section("part", cls).x


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (str, "2024", "2024"),
        (str, "1e-5", "1e-5"),
        (str, "null", "null"),
        (str, "", ""),
        (str, "[a, b]", "[a, b]"),
        (str, "'no'", "no"),
        (str, "a: b # c", "a: b # c"),
        (str | None, "null", None),
        (str | int, "3", 3),
        (str | list[int], "[0, 1]", [0, 1]),
        (float, "1e-5", 1e-5),
        (bool, "off", False),
        (list[str], "[no, 'x, y']", ["no", "x, y"]),
        (dict[str, int], "{a: 1}", {"a": 1}),
        (Inner, "{size: 3}", Inner(size=3)),
        (Literal["no"], "no", "no"),
    ],
)
def test_text_from_a_shell_becomes_what_the_key_wants(kind: Any, text: str, value: Any) -> None:
    assert on_command_line(one(kind), text) == value


def test_numbers_from_a_shell_are_still_checked() -> None:
    with pytest.raises(ConfigError, match=r"command line: part.x: expected a whole number, got the text 'a'"):
        on_command_line(one(int), "a")
    with pytest.raises(ConfigError, match=r"command line: part.x: expected true or false, got the number 1"):
        on_command_line(one(bool), "1")
