"""Conventions of the core that no reviewer should have to watch: documentation, names, and what may be imported."""

from __future__ import annotations

import ast
import inspect
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import drivetrain
from drivetrain import hookspecs, plugin
from drivetrain.plugin import Backend, Device, Plugin, Precision

CORE = Path(drivetrain.__file__).parent
HOOKS = hookspecs.hooks()


def arguments_of(hook: str) -> list[str]:
    return list(inspect.signature(getattr(hookspecs.HookSpecs, hook)).parameters)[1:]


# ------------------------------------------------------------------------------------------------------------ the hooks


def test_the_six_hooks_that_are_fixed_exist():
    assert {"wrap_model", "wrap_optimizer", "backward", "step", "clip_grad_norm", "save_state"} <= set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_documented_with_its_default(name):
    text = inspect.getdoc(getattr(hookspecs.HookSpecs, name)) or ""
    sentence = text.split("\n\n")[0]
    assert sentence.rstrip().endswith((".", "...")), "the first paragraph is a sentence"
    assert "Default" in text or HOOKS[name].all_called, "what core does without a plugin is part of the contract"


@pytest.mark.parametrize("name", HOOKS)
def test_documented_arguments_are_arguments(name):
    documented = re.findall(r":param (\w+):", inspect.getdoc(getattr(hookspecs.HookSpecs, name)) or "")
    assert set(documented) <= set(arguments_of(name))


@pytest.mark.parametrize("name", HOOKS)
def test_hook_and_argument_names_are_plain_snake_case(name):
    for word in (name, *arguments_of(name)):
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", word)
        assert not keyword.iskeyword(word)
    assert "function" not in arguments_of(name), "bound hooks use that name themselves"


@pytest.mark.parametrize("name", HOOKS)
def test_workers_hooks_begin_with_the_run_once_there_is_one(name):
    before = {"device", "compute_dtypes", "collectives", "init_world"}
    if HOOKS[name].where == "launcher":
        assert arguments_of(name) == ["plan"]
    elif name not in before:
        assert arguments_of(name)[0] == "run"


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_for_roles_that_exist(name):
    assert set(HOOKS[name].roles) <= {"backend", "device", "precision"}
    assert len(set(HOOKS[name].roles)) == len(HOOKS[name].roles) > 0


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_default_with_the_contracts_arguments(name):
    from drivetrain import defaults

    assert list(inspect.signature(getattr(defaults, name)).parameters) == arguments_of(name)


def test_every_default_is_of_a_hook():
    from drivetrain import defaults

    own = [
        name
        for name, value in vars(defaults).items()
        if inspect.isfunction(value) and value.__module__ == defaults.__name__
    ]
    assert {name for name in own if not name.startswith("_")} == set(HOOKS)


@pytest.mark.parametrize("base", [Backend, Device, Precision])
def test_base_classes_implement_no_hook_and_take_no_hooks_name(base):
    assert not set(HOOKS) & set(dir(base))


# ------------------------------------------------------------------------------------------------- the plugins of core


def builtin_plugins() -> list[type[Plugin]]:
    from drivetrain import builtin

    return [getattr(builtin, name) for name in builtin.__all__ if issubclass(getattr(builtin, name), Plugin)]


@pytest.mark.parametrize("found", builtin_plugins(), ids=lambda found: found.__name__)
def test_cores_own_plugins_keep_the_contract(found):
    from drivetrain.binding import Hooks, Origin

    assert found.api == plugin.API
    assert found.__doc__
    instance = found()
    Hooks(object()).register(instance, Origin(found.role, "mine"))
    assert list(found.checks()) == list(found.checks())


@pytest.mark.parametrize("found", builtin_plugins(), ids=lambda found: found.__name__)
def test_cores_own_plugins_are_found_by_entry_point_like_all_others(found):
    from drivetrain import registry

    registry.refresh()
    loaded, _ = registry.load_all(found.role)
    assert found in loaded.values()


# -------------------------------------------------------------------------------------------------- public declarations


@pytest.mark.parametrize(
    "found", [getattr(plugin, name) for name in plugin.__all__ if inspect.isclass(getattr(plugin, name))]
)
def test_public_classes_of_the_contract_are_documented(found):
    assert (found.__doc__ or "").strip()
    if attrs.has(found):
        assert found.__setattr__ is not object.__setattr__, "facts are frozen"


# ---------------------------------------------------------------------------------------------------- names in the core

# Names of backends, of device types and their makers, of communication libraries, and of engines. The core asks
# capabilities, so none of them has a place in its code; prose in docstrings and comments may give examples.
FORBIDDEN = {
    *("ddp", "fsdp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "deepspeed", "megatron", "horovod"),
    *("xla", "spmd", "pjrt", "cuda", "npu", "hpu", "mlu", "musa", "sdaa", "xpu", "mps", "tpu", "ipu", "rocm", "hip"),
    *("neuron", "gaudi", "ascend", "habana", "nvidia", "amd", "intel", "huawei", "cambricon", "graphcore"),
    *("nccl", "gloo", "hccl", "cncl", "mccl", "tccl", "xccl", "rccl", "ucc", "mpi"),
    *("fp8", "te", "torchao", "msamp", "apex"),
}
# Words that mean something else in one file.
ALLOWED = {
    ("world.py", "mpi"): "variables of process launchers: MPI starts processes, it is no communication library here",
}


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every word of the identifiers and strings of a file, in lower case; docstrings and comments aside."""
    tree = ast.parse(path.read_text("utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            texts = [node.value]
        else:
            for field in ("id", "attr", "arg", "name", "module", "asname"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    texts.append(value)
        for text in texts:
            for part in re.split(r"[^A-Za-z0-9]+|_", text):
                yield getattr(node, "lineno", 0), part.lower()
                for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", part):
                    yield getattr(node, "lineno", 0), word.lower()


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_core_names_no_backend_device_vendor_or_engine(path):
    name = str(path.relative_to(CORE))
    found = {(line, word) for line, word in words_of(path) if word in FORBIDDEN and (name, word) not in ALLOWED}
    assert not found, f"{name}: ask Capabilities instead, or find the name in metadata"


def test_words_of_a_file_are_found_wherever_they_hide(tmp_path):
    """The check above must be able to fail."""
    source = '''
    """A docstring may say ddp."""
    import torch.cuda  # a comment may say nccl
    x: int = 0
    """So may the docstring of an attribute: hpu."""
    def prepare_fsdp(is_npu=False): return f"use {x} gloo"
    class DeepSpeedThing: kind = "MULTI_XPU"
    '''
    path = tmp_path / "sample.py"
    path.write_text(inspect.cleandoc(source))
    assert {word for _, word in words_of(path)} & FORBIDDEN == {"cuda", "fsdp", "npu", "gloo", "xpu"}


def test_allowed_words_are_still_needed():
    used = {(str(path.relative_to(CORE)), word) for path in CORE.rglob("*.py") for _, word in words_of(path)}
    assert set(ALLOWED) <= used


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_files_stay_short(path):
    most = 600 if path.name == "hookspecs.py" else 400  # the contract is one list of declarations, to be read in order
    assert len(path.read_text("utf-8").splitlines()) <= most
    assert path.name not in {"utils.py", "helpers.py", "common.py", "misc.py"}


# -------------------------------------------------------------------------------------------------------------- imports


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter has loaded when a statement has run."""
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stdout.splitlines()[-1].split())


HEAVY = {"torch", "numpy", "rich", "safetensors"}


@pytest.mark.parametrize(
    "statement",
    [
        "import drivetrain",
        "import drivetrain; dir(drivetrain)",
        "import drivetrain.plugin, drivetrain.hookspecs, drivetrain.binding",
        "import drivetrain.registry; drivetrain.registry.entries()",
        "import drivetrain.config",
        "import drivetrain.cli",
        "import drivetrain.builtin",
        "from drivetrain import registry; [registry.load_all(role) for role in registry.GROUPS]",
    ],
)
def test_light_parts_import_nothing_heavy(statement):
    assert not modules_after(statement) & HEAVY


def test_importing_the_accelerator_leaves_for_later_what_its_first_call_needs():
    modules = modules_after("from drivetrain import Accelerator")
    assert not modules & {"drivetrain.data.preparing", "drivetrain.checkpoint.writer", "drivetrain.config", "packaging"}
    assert not modules & {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "tensorboard", "deepspeed"}


def test_help_imports_nothing_heavy():
    statement = (
        "from drivetrain.cli import main\n"
        "sys.argv = ['drivetrain', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code"
    )
    assert not modules_after(statement) & HEAVY
