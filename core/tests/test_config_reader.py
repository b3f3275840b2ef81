"""Files of settings: what can be read, and what the message says of those that can't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config.reader import parse, read_file
from drivetrain.config.values import Origin, Value, plain, read_scalar
from drivetrain.errors import ConfigError


def write(path: Path, data: str | bytes) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    return str(caught.value)


def test_values_carry_line_and_column_of_value_and_key(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "# note\nouter:\n  inner:   5\n  list: [a,  b]\n")
    inner = read_file(path).get(("outer", "inner"))
    assert isinstance(inner, Value)
    assert (inner.content, inner.text) == (5, "5")
    assert inner.origin.where == f"{path}:3:12"
    assert str(inner.origin) == f"{path}:3"
    assert inner.where_key.where == f"{path}:3:3"
    items = read_file(path).get(("outer", "list"))
    assert items is not None
    assert [item.origin.column for item in items.content] == [10, 14]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\ufeff# a byte order mark\n"])
def test_an_empty_file_gives_no_settings(tmp_path: Path, text: str) -> None:
    assert read_file(write(tmp_path / "c.yaml", text)).content == {}


def test_json_is_read_with_tabs_and_positions(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", '{\n\t"num_processes": 2,\n\t"ddp": {"eps": 1e-5, "name": "no", "on": true}\n}\n')
    table = read_file(path)
    assert plain(table) == {"num_processes": 2, "ddp": {"eps": 1e-5, "name": "no", "on": True}}
    assert table.content["ddp"].where_key.where == f"{path}:3:2"


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("a: 1\n\tb: 2\n", ":2:1", "a tab; YAML is indented with spaces"),
        ("a: 1\nb: {x: 1, x: 2}\n", ":2:11", "b.x: given twice (first in line 2)"),
        ("a: 1\n\na: 2\n", ":3:1", "a: given twice (first in line 1)"),
        ("- a\n- b\n", ":1:1", "expected settings as 'key: value' lines"),
        ("just text\n", ":1:1", "expected settings as 'key: value' lines"),
        ("a: [1, 2\n", ":2:1", "flow sequence"),
        ("a: b: c\n", ":1:5", "a colon is not allowed here"),
        ("a: 'open\n", ":2:1", "quoted scalar"),
        ("a: 1\n---\na: 2\n", ":2:1", "a second document"),
        (
            "a: !!python/object/apply:os.system [id]\n",
            ":1:4",
            "the tag !!python/object/apply:os.system is not understood",
        ),
        ("a: !!set {x}\n", ":1:4", "the tag !!set is not understood"),
        ("a: !mine 3\n", ":1:4", "the tag !mine is not understood"),
        ("[a, b]: 3\n", ":1:1", "a key must be a word"),
        ("base: &b {x: 1}\na:\n  <<: *b\n", ":3:3", "merge keys (<<) are not supported"),
        ("a: &loop [*loop]\n", ":1:4", "an alias to a collection that contains it"),
        ("a: *nobody\n", ":1:4", "undefined alias"),
        ("a: 1\nb: \x07\n", ":2:4", "'\\x07' is not allowed"),
    ],
)
def test_what_is_no_settings_is_refused_with_its_position(tmp_path: Path, text: str, where: str, reason: str) -> None:
    path = write(tmp_path / "c.yaml", text)
    message = refused(path)
    assert message.startswith(path + where + ":"), message
    assert reason in message


def test_all_duplicates_are_reported_at_once(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "c.yaml", "a: 1\na: 2\nb: 1\nb: 2\n"))
    assert message.startswith("2 problems")
    assert "a: given twice" in message
    assert "b: given twice" in message


def test_an_alias_bomb_is_refused_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "counting what aliases repeat" in refused(write(tmp_path / "c.yaml", "\n".join(lines)))


def test_an_alias_used_twice_is_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "a: &x [1, 2]\nb: *x\n")
    assert plain(read_file(path)) == {"a": [1, 2], "b": [1, 2]}


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "a: " + "[" * 2000 + "]" * 2000)
    assert "nested too deeply" in refused(path)


def test_bytes_that_are_no_utf8_are_refused_with_their_position(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", b"a: 1\nb: caf\xe9\n")
    assert refused(path).startswith(f"{path}:2:7: not UTF-8 (byte 0xe9)")


def test_a_file_too_large_for_settings_is_refused(tmp_path: Path) -> None:
    assert "is larger than" in refused(write(tmp_path / "c.yaml", b"#" * (1 << 21)))


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path: Path) -> None:
    assert "does not exist" in refused(str(tmp_path / "absent.yaml"))
    assert "is a directory" in refused(str(tmp_path))
    assert "can't be read" in refused("nul\0.yaml")


def test_an_unreadable_file_is_an_error_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "c.yaml", "a: 1\n")

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", deny)
    assert "Permission denied" in refused(path)


PIECES = [
    *(
        "a",
        "b",
        ": ",
        ":",
        "- ",
        "? ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "&x ",
        "*x",
        "!t ",
        "<<",
        "'",
        '"',
        "|",
        "#",
        "\n",
        "  ",
    ),
    *("\t", "---", "...", "%YAML 9.9\n", "\\", "\0", "\x85", "\ud800", "\U0001f600", "~", "1e9999", "0x", "="),
]


def outcome(read: Callable[[], Value | None]) -> str:
    """The text of the error; empty if there were settings, or nothing at all."""
    try:
        found = read()
    except ConfigError as error:
        return str(error)
    assert found is None or isinstance(found, Value)
    return ""


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_whatever_a_file_holds_it_is_settings_or_an_error_with_its_place(text: str) -> None:
    said = outcome(lambda: parse(text, lambda mark: Origin("file", "c.yaml", mark.line + 1, mark.column + 1)))
    assert not said or "c.yaml" in said


@given(st.binary(max_size=40))
def test_whatever_bytes_a_file_has_they_are_settings_or_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(data)
    said = outcome(lambda: read_file(str(path)))
    assert not said or "bytes.yaml" in said


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", False),
        ("Yes", True),
        ("OFF", False),
        ("nO", "nO"),
        ("y", "y"),
        ("~", None),
        ("", None),
        ("null", None),
        ("none", "none"),
        ("12", 12),
        ("-1_000", -1000),
        ("0x1F", 31),
        ("0x_", "0x_"),
        ("0x", "0x"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0,1", "0,1"),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("3.", 3.0),
        ("-.inf", float("-inf")),
        ("2020-01-01", "2020-01-01"),
        ("1.2.3", "1.2.3"),
        (".", "."),
        ("e5", "e5"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    read = read_scalar(text)
    assert read == value
    assert type(read) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_python_writes_is_read_back(number: float) -> None:
    assert read_scalar(repr(number)) == number


@given(st.integers(min_value=-(10**60), max_value=10**60))
def test_every_whole_number_is_read_back(number: int) -> None:
    assert read_scalar(str(number)) == number


@given(st.text(alphabet="0123456789._+-eExabfnotrusy", max_size=8))
def test_where_yaml_reads_a_number_or_boolean_so_do_we_or_it_stays_text(text: str) -> None:
    try:
        expected = yaml.safe_load(text) if text.strip() == text and text else None
    except (yaml.YAMLError, ValueError):
        return
    read = read_scalar(text)
    if isinstance(expected, (bool, int, float)) and not isinstance(read, str) and expected == expected:
        assert read == expected
        assert type(read) is type(expected)
