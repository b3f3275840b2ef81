"""Files of Accelerate's: recognised wherever settings are read, and translated with nothing left out in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from drivetrain.cli import main
from drivetrain.config import resolve
from drivetrain.config.migration import Translation, translate
from drivetrain.config.reader import parse, read_file
from drivetrain.config.values import Origin, plain
from drivetrain.errors import ConfigError

ON_MANY = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

PLUGIN = """
migration = Migration(
    section="wide_config",
    where={"distributed_type": ("wide",), "wide_config.wide_version": ("2",)},
    keys={
        "wide_version": {"*": {}},
        "wide_depth": "wide.depth",
        "wide_mode": {"full_*": {"wide.mode": "full"}},
        "steps": "gradient_accumulation_steps",
        "wide_words": lambda text: {"wide.words": text.lower()},
    },
    notes={"wide_mode": "use depth"},
)

@property
def capabilities(self): return Capabilities(distributed_type="WIDE")
"""


def translated(text: str) -> Translation:
    file = parse(text, lambda mark: Origin("file", "old.yaml", mark.line + 1, mark.column + 1))
    assert file is not None
    return translate(file)


def settings(text: str) -> Any:
    return plain(translated(text).layer)


def migrate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["config", "migrate", *arguments], prog_name="drivetrain")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "old.yaml"
    file.write_text(ON_MANY)
    return file


def test_a_usual_file_is_translated_whole() -> None:
    assert settings(ON_MANY) == {
        "gpu_ids": "0,1",
        "machine_rank": 0,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 4,
        "rdzv_backend": "static",
    }
    assert translated(ON_MANY).missing == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: NO\n", {"num_processes": 1}),
        ("distributed_type: NO\nnum_processes: 2\n", {"num_processes": 2}),
        ("num_processes: 2\ndistributed_type: 'NO'\n", {"num_processes": 2}),
        ("distributed_type: MULTI_CPU\nuse_cpu: true\n", {"device": "cpu"}),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\ndebug: true\n", {"check_collectives": True}),
        ("distributed_type: MULTI_GPU\nmixed_precision: no\n", {"mixed_precision": False}),  # a word to its class
        ("distributed_type: MULTI_GPU\nfp16: true\nmain_process_ip: null\n", {"mixed_precision": "fp16"}),
        (
            "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_dynamic: true}\n",
            {"compile": {"backend": "inductor", "dynamic": True}},
        ),
        ("distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: 'NO', dynamo_mode: default}\n", {}),
        ("distributed_type: MULTI_GPU\ndynamo_backend: EAGER\n", {"compile": {"backend": "eager"}}),
    ],
)
def test_keys_that_concern_core(text: str, expected: dict[str, Any]) -> None:
    assert settings(text) == expected
    assert translated(text).missing == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("enable_cpu_affinity: true", "old.yaml:2:1: enable_cpu_affinity: true: NOT TRANSLATED: bind the processes"),
        ("tpu_name: pod-1", "old.yaml:2:1: tpu_name: pod-1: NOT TRANSLATED: there is no such setting here"),
        ("main_training_function: train", "main_training_function: train: NOT TRANSLATED: the script is run as a"),
        ("other_config: {a: 1}", "other_config: {a: 1}: NOT TRANSLATED: no installed plugin reads it"),
        ("mpirun_config: {hostfile: x}", "mpirun_config.hostfile: x: NOT TRANSLATED: start the script with mpirun"),
        (
            "dynamo_config: {dynamo_backend: EAGER, dynamo_use_regional_compilation: true}",
            "old.yaml:2:40: dynamo_config.dynamo_use_regional_compilation: true: NOT TRANSLATED: call block.compile()",
        ),
    ],
)
def test_what_has_no_counterpart_is_named_with_its_position(text: str, line: str) -> None:
    (missing,) = translated(f"distributed_type: MULTI_GPU\n{text}\n").missing
    assert line in str(missing)


def test_every_key_has_a_line() -> None:
    lines = translated(ON_MANY + "fp8_config: {}\n").lines
    assert len(lines) == len(ON_MANY.splitlines()) + 1
    assert str(lines[2]) == "old.yaml:3:1: distributed_type: nothing to set: several processes get the installed " + (
        "default backend"
    )
    assert str(lines[-1]).endswith("fp8_config: not used there, nothing to set")


# ------------------------------------------------------------------------------------------------------------- plugins


def test_a_plugin_says_how_its_section_was_written(site: Any) -> None:
    site.install_backend("wide", PLUGIN)
    text = "distributed_type: WIDE\nwide_config: {wide_version: 2, wide_depth: 3, wide_mode: FULL_X, steps: 4}\n"
    assert settings(text) == {
        "backend": "wide",
        "wide": {"depth": 3, "mode": "full"},
        "gradient_accumulation_steps": 4,
    }
    found = translated(
        "distributed_type: WIDE\nwide_config: {wide_version: 2, wide_mode: half, wide_x: 1, wide_off: no}\n"
    )
    assert [str(line) for line in found.missing] == [
        "old.yaml:2:32: wide_config.wide_mode: half: NOT TRANSLATED: use depth",
        "old.yaml:2:49: wide_config.wide_x: 1: NOT TRANSLATED: there is no such setting here",
    ]


def test_a_section_of_a_plugin_that_is_not_meant_counts_nothing(site: Any) -> None:
    site.install_backend("wide", PLUGIN)
    found = translated("distributed_type: MULTI_GPU\nwide_config: {wide_version: 2, wide_depth: 3}\n")
    assert (plain(found.layer), found.missing) == ({}, [])
    assert "it counts there only with distributed_type: wide, wide_config.wide_version: 2" in found.lines[1].text


def test_a_backend_without_a_table_is_found_by_what_it_reports(site: Any) -> None:
    site.install_backend("tall", "@property\ndef capabilities(self): return Capabilities(distributed_type='TALL')")
    assert settings("distributed_type: TALL\n") == {"backend": "tall"}
    site.install_backend("taller", "@property\ndef capabilities(self): return Capabilities(distributed_type='TALL')")
    (line,) = translated("distributed_type: TALL\n").missing
    assert "several installed backends are of this kind, choose one: tall, taller" in line.text


def test_a_backend_that_can_be_had_comes_with_the_command(site: Any) -> None:
    of_type, of_section = translated("distributed_type: ALPHA\nbeta_config: {a: 1}\n").missing
    assert of_type.text.endswith('of this kind; pip install "drivetrain[alpha]", then translate again')
    assert of_section.text.endswith('reads it; pip install "drivetrain[beta]", then translate again')


def test_a_section_of_a_plugin_that_has_no_table_is_named_without_telling_to_install_it(site: Any) -> None:
    site.install_backend("alpha", "@property\ndef capabilities(self): return Capabilities(distributed_type='ALPHA')")
    found = translated("distributed_type: ALPHA\nalpha_config: {a: 1}\n")
    assert plain(found.layer) == {"backend": "alpha"}
    assert found.missing[0].text == "{a: 1}: NOT TRANSLATED: no installed plugin reads it"


# ----------------------------------------------------------------------------------------------------- where it is met


def test_settings_are_refused_with_the_command_first(old: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(old, environment={})
    command = f"drivetrain config migrate {old} --output NEW.yaml"
    assert str(caught.value).splitlines() == [
        f"{old} is a configuration file of Accelerate's; to have it translated: {command}",
        "  19 of 19 keys are taken care of (8 the same, 11 with nothing to set)",
    ]


def test_a_refusal_names_what_a_translation_will_lack(old: Path) -> None:
    old.write_text(f"{ON_MANY}tpu_name: pod-1\n")
    with pytest.raises(ConfigError) as caught:
        resolve(old, environment={})
    line = f"  {old}:20:1: tpu_name: pod-1: NOT TRANSLATED: there is no such setting here"
    assert str(caught.value).splitlines()[2:] == [line]


def test_a_single_key_of_theirs_in_a_file_of_ours_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true\n")
    with pytest.raises(ConfigError, match=r"2:1: use_cpu: unknown key; Accelerate has one .* is here: device: cpu"):
        resolve(file, environment={})


def test_migrate_writes_a_file_that_is_read_here(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    old.write_text(f"{ON_MANY}tpu_name: pod-1\n")
    result = migrate(str(old), "--output", str(new))
    assert result.exit_code == 0, result.stderr
    assert result.stderr.endswith(f"wrote {new}; 1 key(s) could not be translated, see its end\n")
    head, missing, _ = result.stderr.splitlines()
    assert head == f"{old}: 19 of 20 keys are taken care of (8 the same, 11 with nothing to set); --verbose lists each"
    assert missing.endswith("tpu_name: pod-1: NOT TRANSLATED: there is no such setting here")
    resolved = resolve(new, environment={})
    assert (resolved.run.mixed_precision, resolved.run.num_processes, resolved.run.gpu_ids) == ("bf16", 4, [0, 1])
    comment = f"#   {old}:20:1: tpu_name: pod-1: NOT TRANSLATED: there is no such setting here"
    assert new.read_text().splitlines()[-1] == comment
    assert "exists already; --overwrite replaces it" in migrate(str(old), "--output", str(new)).stderr
    assert migrate(str(old), "--output", str(new), "--overwrite").exit_code == 0


def test_migrate_shows_the_translation_alone_on_the_standard_output(old: Path) -> None:
    result = migrate(str(old))
    assert result.exit_code == 0
    assert plain(parse(result.stdout, lambda mark: Origin("file"))) == settings(ON_MANY)  # type: ignore[arg-type]


def test_migrate_says_of_every_key_what_became_of_it_when_asked(old: Path) -> None:
    lines = migrate(str(old), "--verbose").stderr.splitlines()
    assert len(lines) == len(ON_MANY.splitlines())
    assert f"{old}:11:1: mixed_precision: the same" in lines


def test_keys_are_counted_by_what_becomes_of_them() -> None:
    text = "distributed_type: MULTI_CPU\nmixed_precision: bf16\nfp16: true\ndebug: false\ntpu_name: a\n"
    assert translated(text).summary == (
        "4 of 5 keys are taken care of (1 the same, 2 in other words, 1 with nothing to set)"
    )


def test_migrate_says_when_the_translation_is_not_valid_as_it_stands(old: Path) -> None:
    old.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf61\nnum_processes: many\n")
    result = migrate(str(old))
    assert result.exit_code == 2
    assert "Error: 2 problems in the settings:\n" in result.stderr
    assert "  the translation:3:16: num_processes: expected a whole number" in result.stderr
    assert "  the translation:2:18: no precision 'bf61'; did you mean 'bf16'?" in result.stderr
    old.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf61\n")
    assert "Error: the translation:2:18: no precision 'bf61'; did you mean 'bf16'?" in migrate(str(old)).stderr


def test_a_file_of_ours_needs_no_translation(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("num_processes: 2\n")
    assert read_file(str(file)).content
    result = migrate(str(file))
    assert result.exit_code == 2
    assert "no configuration file of Accelerate's" in result.stderr
