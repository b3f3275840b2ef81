"""``drivetrain doctor`` against hostile plugins: each must become a row, and none may disturb another."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from drivetrain import doctor, registry
from drivetrain.cli.doctor import doctor as command
from drivetrain.doctor import Row
from drivetrain.plugin import Check

CHECKS = "@classmethod\ndef checks(cls):\n    "


def examine(role: str, name: str, timeout: float = 30.0) -> dict[str, Check]:
    rows = doctor.examine(registry.find(role, name), timeout)
    assert {row.subject for row in rows} == {f"{role} {name!r} ({name}-dist 1.0)"}
    return {row.check.name: row.check for row in rows}


def test_healthy_plugin_gives_its_own_rows(site):
    site.install_backend(
        "alpha", CHECKS + "yield Check('engine', True, '2.1')\n    yield Check('link', False, 'slow', 'buy a cable')"
    )
    assert examine("backend", "alpha") == {
        "load": Check("load", True, "API 1.0"),
        "engine": Check("engine", True, "2.1"),
        "link": Check("link", False, "slow", "buy a cable"),
    }


def test_device_says_whether_it_is_present(site):
    site.install_device("vendor", "@classmethod\ndef present(cls): raise OSError('lib missing')")
    present = examine("device", "vendor")["present"]
    assert present.ok is False
    assert "OSError: lib missing" in present.detail


@pytest.mark.parametrize(("there", "said"), [("True", "yes, Abacus"), ("False", "no Abacus found here")])
def test_a_device_is_called_by_its_own_name(site, there, said):
    site.install_device("vendor", f"label = 'Abacus'\n@classmethod\ndef present(cls): return {there}")
    assert examine("device", "vendor")["present"] == Check("present", None, said)


def test_a_device_that_nobody_looks_for_does_not_count_as_missing(site):
    site.install_device("vendor", "label = 'Abacus'")
    said = "not looked for: used only where settings name it"
    assert examine("device", "vendor")["present"] == Check("present", None, said)


def test_nobody_waits_for_plugins_that_hang_once_the_rest_is_not_wanted(site, monkeypatch):
    monkeypatch.setattr(doctor, "_examine_torch", lambda timeout: [])
    for name in ("one", "two", "three"):
        site.install_backend(
            name,
            module=f"""
            import pathlib, time
            pathlib.Path({str(site.directory)!r}, "{name}-began").touch()
            time.sleep(300)
        """,
        )
    rows = doctor.examine_all(timeout=250.0)
    next(rows)
    while not list(site.directory.glob("*-began")):
        time.sleep(0.05)
    rows.close()  # returns at once, long before the timeout
    assert not doctor._running


def test_plugin_that_raises_at_import_is_a_row_with_the_cause(site):
    site.install_backend("alpha", module="raise RuntimeError('driver too old')")
    (check,) = examine("backend", "alpha").values()
    assert (check.name, check.ok) == ("load", False)
    assert "RuntimeError: driver too old" in check.detail


def test_segfault_in_checks_is_a_row_that_names_the_signal_and_keeps_the_earlier_rows(site):
    site.install_backend("alpha", CHECKS + "yield Check('before', True)\n    import ctypes; ctypes.string_at(0)")
    checks = examine("backend", "alpha")
    assert checks["before"].ok is True
    assert checks["process"].ok is False
    assert "SIGSEGV" in checks["process"].detail
    assert "alpha-dist" in checks["process"].fix


def test_hanging_import_is_a_row_and_its_children_are_gone(site):
    pid = site.directory / "child"
    site.install_backend(
        "alpha",
        module=f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        open({str(pid)!r}, "w").write(str(child.pid))
        time.sleep(300)
        """,
    )
    (check,) = examine("backend", "alpha", timeout=4.0).values()
    assert check.ok is False
    assert "did not finish in 4 s" in check.detail
    deadline = time.monotonic() + 10
    while _alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(int(pid.read_text()))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that was killed and waits for init to take note of it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_printed_garbage_does_not_disturb_the_rows_and_flooding_does_not_block(site):
    site.install_backend(
        "alpha", CHECKS + "import os\n    os.write(1, b'\\xff{not json}\\n' * 200_000)\n    yield Check('engine', True)"
    )
    assert set(examine("backend", "alpha")) == {"load", "engine"}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("raise RuntimeError('boom')", "raised RuntimeError: boom"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("return 3", "raised TypeError"),
        ("return None", "raised TypeError"),
        ("return ['fine']", "a row must be a drivetrain.plugin.Check"),
        ("return [Check('x', 'yes')]", "a row must be a drivetrain.plugin.Check"),
    ],
)
def test_checks_that_break_their_contract_are_a_row(site, body, detail):
    site.install_backend("alpha", CHECKS + body)
    check = examine("backend", "alpha")["checks"]
    assert check.ok is False
    assert detail in check.detail


def install_tracker(site, body: str) -> dict[str, Check]:
    site.install(
        "board-dist",
        entry_points={"drivetrain.trackers": {"board": "fake_tracker:Board"}},
        modules={"fake_tracker": "from drivetrain.plugin import Check\nfrom drivetrain.tracking import *\n" + body},
    )
    return examine("tracker", "board")


def test_tracker_without_its_engine_is_no_fault_and_says_how_to_have_it(site):
    body = "class Board(GeneralTracker):\n    name = 'board'\n    requires = ('board-engine>=2',)\n"
    assert install_tracker(site, body)["engine"] == Check(
        "engine", None, "needs board-engine>=2, which is not installed", "to use it: pip install 'board-engine>=2'"
    )


def test_tracker_gives_its_own_rows(site):
    body = "class Board(GeneralTracker):\n    name = 'board'\n"
    body += "    @classmethod\n    def checks(cls): return [Check('key', False, 'none', 'log in')]\n"
    assert install_tracker(site, body) == {
        "load": Check("load", True),
        "key": Check("key", False, "none", "log in"),
    }


@pytest.mark.parametrize("body", ["class Board: pass", "class Board(GeneralTracker): pass"])
def test_class_that_is_no_tracker_is_a_row(site, body):
    assert install_tracker(site, body)["tracker"].ok is False


def test_endless_checks_end(site):
    site.install_backend("alpha", CHECKS + "while True: yield Check('again', True)")
    checks = examine("backend", "alpha")
    assert "more than 100 rows" in checks["checks"].detail


def test_leaving_the_process_is_a_row_even_with_exit_code_zero(site):
    site.install_backend("alpha", CHECKS + "import os; print('bye', flush=True); os._exit(0)")
    check = examine("backend", "alpha")["process"]
    assert check.ok is False
    assert "exit code 0 before its checks did" in check.detail
    assert "bye" in check.detail


def test_worker_imports_what_its_parent_would_and_nothing_from_the_current_directory(site, tmp_path, monkeypatch):
    site.install_backend("alpha", CHECKS + "import colorsys; yield Check(colorsys.__file__, True)")
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "colorsys.py").write_text("")
    monkeypatch.chdir(tmp_path)
    checks = examine("backend", "alpha")
    assert len(checks) == 2
    assert str(tmp_path / "colorsys.py") not in checks


def test_examined_plugin_imports_no_torch_and_no_other_plugin(site):
    site.install_backend("other", module="raise SystemExit('imported')")
    site.install_backend("alpha", CHECKS + "import sys; yield Check('torch', 'torch' not in sys.modules)")
    assert examine("backend", "alpha")["torch"].ok is True


# ----------------------------------------------------------------------------------------------------- general findings


def rows_of(site, monkeypatch, checks=()) -> list[Row]:
    """The general rows, with torch's own given, since importing it takes seconds."""
    monkeypatch.setattr(doctor, "_examine_torch", lambda timeout: list(checks))
    return doctor.general_rows(1.0)


def test_member_of_another_version_is_bad_and_third_parties_are_free(site, monkeypatch):
    site.install("drivetrain-alpha", version="0.0.9")
    site.install("drivetrain-beta", version="0.1.0")
    site.install("drivetrain-stranger", version="7")
    found = {row.subject: row.check for row in rows_of(site, monkeypatch)}
    assert found["drivetrain-alpha"].ok is False
    assert found["drivetrain-alpha"].fix == "pip install --upgrade drivetrain drivetrain-alpha"
    assert found["drivetrain-beta"].ok is True
    assert "drivetrain-stranger" not in found


def test_clashing_names_and_unreadable_metadata_are_rows(site, monkeypatch):
    site.install_backend("alpha", distribution="one")
    site.install_backend("alpha", distribution="two")
    (site.install("broken", entry_points={"drivetrain.backends": {"bad": "bad:Plug"}}) / "METADATA").unlink()
    registry.refresh()
    bad = [row for row in rows_of(site, monkeypatch) if row.check.ok is False]
    assert {row.subject for row in bad} == {"metadata", "backend 'alpha'"}


def test_accelerator_that_torch_does_not_use_is_pointed_out(tmp_path):
    assert list(doctor._hardware_rows(str(tmp_path))) == []
    (tmp_path / "sys/class/accel/accel0").mkdir(parents=True)
    (row,) = doctor._hardware_rows(str(tmp_path))
    assert row.check.ok is None
    assert "accel0" in row.check.detail


def test_broken_torch_names_the_vendor_code_it_loads_and_the_switch(site, monkeypatch):
    """A made-up torch that, like the real one, imports every entry of ``torch.backends`` unless told not to."""
    site.install(
        "vendor",
        entry_points={"torch.backends": {"vendor": "vendor_torch:load"}},
        modules={
            "torch": """
            import os
            if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
                raise RuntimeError("undefined symbol")
            __version__ = "9.9"
            class accelerator:
                current_accelerator = staticmethod(lambda check_available=False: None)
            """
        },
    )
    environment = dict(os.environ)
    (check,) = doctor._examine_torch(30.0)
    assert check.ok is False
    assert "vendor = vendor_torch:load" in check.detail
    assert "undefined symbol" in check.detail
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.fix
    assert dict(os.environ) == environment


# --------------------------------------------------------------------------------------------------------- the command


def run(monkeypatch, rows: list[Row], *arguments: str):
    monkeypatch.setattr(doctor, "examine_all", lambda timeout: (row for row in rows))
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "soon"])
def test_a_timeout_that_can_not_be_waited_is_refused(monkeypatch, seconds):
    result = run(monkeypatch, [], "--timeout", seconds)
    assert result.exit_code == 2
    assert "--timeout" in result.stderr


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (None, 0), (False, 1)])
def test_exit_code_tells_whether_anything_is_broken(monkeypatch, ok, code):
    assert run(monkeypatch, [Row("torch", Check("import", ok))]).exit_code == code


def test_findings_are_printed_whole_below_their_subject(monkeypatch):
    rows = [
        Row("backend 'alpha'", Check("load", True, "API 1.0")),
        Row("backend 'alpha'", Check("engine", False, "died\nlast words", "pip install drivetrain[alpha]")),
    ]
    lines = run(monkeypatch, rows).output.splitlines()
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "backend 'alpha'",
        "ok load API 1.0",
        "BAD engine died",
        "last words",
        "to do: pip install drivetrain[alpha]",
    ]
    assert lines[3].index("died") == lines[4].index("last words") == lines[5].index("to do"), "in a column of their own"


def test_json_has_a_row_each(monkeypatch):
    result = run(monkeypatch, [Row("torch", Check("import", True, "2.9"))], "--json")
    assert json.loads(result.output) == [{"subject": "torch", "name": "import", "ok": True, "detail": "2.9", "fix": ""}]


def test_whole_examination_covers_every_installed_plugin(site, monkeypatch):
    monkeypatch.setattr(doctor, "_examine_torch", lambda timeout: [])
    site.install_backend("alpha")
    site.install_device("vendor")
    site.install_backend("broken", module="import os; os.abort()")
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 1
    found = {(row["subject"], row["name"]): row["ok"] for row in json.loads(result.output)}
    assert found["backend 'alpha' (alpha-dist 1.0)", "load"] is True
    assert found["device 'vendor' (vendor-dist 1.0)", "load"] is True
    assert found["backend 'broken' (broken-dist 1.0)", "process"] is False


def test_a_plugin_whose_engine_is_not_installed_is_no_fault(site):
    site.install_precision("alpha", "requires = ('no-such-engine-xyz>=2',)")
    [check] = examine("precision", "alpha").values()
    assert (check.name, check.ok) == ("engine", None)
    assert "needs no-such-engine-xyz>=2, which is not installed; pip install 'no-such-engine-xyz>=2'" in check.detail
