import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from penstock.__main__ import COMMANDS, main
from penstock.core.errors import RefusedError
from penstock.parity import register, report, unregister
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.cases import Case, select
from penstock.parity.compare import Row, failed
from penstock.parity.report.terminal import errors
from penstock.parity.rules import FAMILY

SOURCE = pathlib.Path(__file__).parents[2] / "src"
ONE_CASE = ("parity", "--quick", "--backend", "numpy", "--cases", "B/adamw/float32/*")


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_clean_run_prints_a_table_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ONE_CASE) == 0
    out = capsys.readouterr().out
    assert "B/adamw/float32/none/state-default" in out
    assert "within" in out
    assert "6 of 6 comparisons are within their bounds, 0 are not." in out


def test_a_broken_bound_is_named_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    class WithoutDecay(NumpyBackend):
        name = "faulty"

        def start(self, case: Case) -> NumpyRun:
            setting = dataclasses.replace(case.problem.setting, weight_decay=0.0)
            return NumpyRun(dataclasses.replace(case, problem=dataclasses.replace(case.problem, setting=setting)))

    register(WithoutDecay())
    try:
        assert main(("parity", "--quick", "--backend", "faulty", "--cases", "B/adamw/float32/*")) == 1
    finally:
        unregister("faulty")
    out = capsys.readouterr().out
    assert "BROKEN" in out
    assert "B/adamw/float32/none/state-default on faulty after 1 steps: parameter has relative error" in out


def test_comparisons_without_a_bound_are_told_as_information(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("parity", "--backend", "numpy", "--backend", "eager", "--cases", "differences/adamw/*")) == 0
    out = capsys.readouterr().out
    assert "Nothing was compared with a bound: this is for information." in out
    assert "comparisons are within" not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--backend", "cuda"), "backend='cuda' is not known; it must be one of numpy, eager, compiled, triton, jax"),
        (("--cases", "ada"), "no case matches 'ada'"),
        (("--report", "/dev/null/there"), "--report '/dev/null/there': cannot write there: Not a directory."),
        (("--report", "a\0b"), "--report 'a\\x00b': cannot write there: "),
        (
            ("--import", "no_such_module"),
            "--import 'no_such_module': it cannot be imported: ModuleNotFoundError: No module named",
        ),
        (("--steps", "3"), "unrecognized arguments: --steps 3"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_status_2(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(("parity", *arguments))
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    assert status == 2
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""


def test_the_json_has_every_row_and_says_where_it_comes_from(tmp_path: pathlib.Path) -> None:
    assert main((*ONE_CASE, "--report", str(tmp_path / "new" / "folder"))) == 0
    page, file = sorted((tmp_path / "new" / "folder").iterdir())
    assert (page.name, file.name) == ("parity.html", "parity.json")
    content = json.loads(file.read_text())
    assert content["schema"] == report.SCHEMA
    assert set(content) == {
        "schema",
        "penstock",
        "command",
        "versions",
        "device",
        "seconds",
        "backends",
        "not_available",
        "not_covered",
        "broken",
        "sections",
    }
    assert content["versions"]["numpy"]
    assert content["broken"] == 0
    assert content["backends"] == [{"name": "numpy", "peer": False}]
    (section,) = content["sections"]
    assert set(section) == {"name", "title", "seconds", "verdicts", "refused", "rows"}
    assert set(section["seconds"]) == {"numpy", "reference"}
    (verdict,) = section["verdicts"]
    assert (verdict["comparisons"], verdict["judged"], verdict["beyond"]) == (6, 6, 0)
    assert [(row["steps"], row["quantity"]) for row in section["rows"]] == [
        (steps, quantity) for steps in (1, 100) for quantity in ("parameter", "exp_avg", "exp_avg_sq")
    ]
    for row in section["rows"]:
        assert row["within"] is True
        assert 0 <= row["relative_error"] <= row["relative_bound"]
        assert 0 <= row["element_ratio"] <= row["ratio"] <= verdict["largest_ratio"] <= 1
        assert row["failure"] is None


def test_a_report_that_cannot_be_finished_leaves_the_last_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write_json(tmp_path, {"rows": [1]})
    with pytest.raises(RefusedError, match="JSON"):
        report.write_json(tmp_path, {"rows": [float("nan")]})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(RefusedError, match=r"parity\.json' could not be written: disk full"):
        report.write_json(tmp_path, {"rows": [2]})
    assert [path.name for path in tmp_path.iterdir()] == ["parity.json"]
    assert json.loads((tmp_path / "parity.json").read_text()) == {"rows": [1]}


def test_a_report_that_cannot_be_finished_is_one_sentence_and_exit_status_2_after_the_table(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert main((*ONE_CASE, "--report", str(tmp_path))) == 2
    out, err = capsys.readouterr()
    assert "6 of 6 comparisons are within their bounds" in out
    assert err.startswith("penstock parity: the report ")
    assert err.endswith("disk full\n")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_json_has_the_usual_permissions(tmp_path: pathlib.Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        written = report.write_json(tmp_path, {})
    finally:
        os.umask(before)
    assert written.stat().st_mode & 0o777 == mode


def test_the_table_shows_the_bound_when_a_backend_has_no_number() -> None:
    (case,) = select("B/adamw/float32/*")
    nan = float("nan")
    bad = failed(case.name, "broken", 1, RuntimeError("it fell over"))
    poisoned = Row(case.name, "poisoned", 1, "parameter", nan, 2.5e-7, nan, 3.0, nan)
    good = Row(case.name, "good", 1, "parameter", 1e-8, 2.5e-7, 0.5, 4.0, 0.125)
    for rows, bound in (([bad, poisoned, good], "2.5e-07 | 4"), ([bad, poisoned], "2.5e-07 | 3"), ([bad], "-")):
        made = errors(rows)
        assert list(made.columns[-2].cells) == [bound]


def test_a_quick_run_has_every_rule_dtype_and_compensation() -> None:
    def kinds(cases: list[Case]) -> set[tuple[str, str, str]]:
        return {(case.problem.rule.name, case.problem.dtype, case.storage.compensation) for case in cases}

    quick, full = select(None, quick=True), select(None)
    of_others = [case for case in full if case.problem.rule.name not in FAMILY]
    assert kinds(quick) >= kinds(full) - kinds(of_others)
    assert {case.problem.rule for case in quick} == {case.problem.rule for case in full}
    assert {case.storage.state_dtype for case in quick} == {case.storage.state_dtype for case in full}
    assert len(quick) < 0.7 * len(full)
    assert select("A/*", quick=True) == select("A/*")  # what is asked for is not left out


def test_a_module_that_registers_is_imported_from_the_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optimizers_of_somebody.py").write_text(
        "from penstock.parity import register\n"
        "from penstock.parity.backends.specification import NumpyBackend\n"
        "class Theirs(NumpyBackend):\n"
        "    name = 'theirs'\n"
        "register(Theirs())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ("--import", "optimizers_of_somebody", "--backend", "theirs", "--cases", "B/adamw/float32/*")
    try:
        assert main(("parity", "--quick", *arguments)) == 0
    finally:
        unregister("theirs")
    assert "6 of 6 comparisons" in capsys.readouterr().out


def test_the_numpy_backend_needs_neither_framework() -> None:
    done = python(
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        "from penstock.__main__ import main\n"
        "sys.exit(main(['parity', '--quick', '--backend', 'numpy', '--cases', 'B/adamw/float32/*']))"
    )
    assert done.returncode == 0, done.stderr
    assert "6 of 6 comparisons" in done.stdout


def test_a_backend_without_its_framework_is_refused_when_asked_for() -> None:
    done = python(
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.__main__ import main\n"
        "sys.exit(main(['parity', '--quick', '--backend', 'eager']))"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("penstock parity: backend='eager' cannot run here: ")
    assert done.stderr.count("\n") == 1


def test_parsing_imports_no_framework() -> None:
    done = python(
        "import sys, penstock.parity, penstock.__main__ as entry\n"
        "from importlib import import_module\n"
        "for name in entry.COMMANDS: import_module('penstock.commands.' + name)\n"
        "print(sorted({'torch', 'jax', 'optax'} & set(sys.modules)))"
    )
    assert done.stdout == "[]\n", done.stderr
    assert set(COMMANDS) >= {"demo", "parity"}


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "parity" in capsys.readouterr().out
