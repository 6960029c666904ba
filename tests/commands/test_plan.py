"""`penstock plan`: a tiny shape from end to end, and bad usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.__main__ import main
from penstock.planner.report import counted

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"layers": 2, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 11, "batch": 2, "sequence": 4, "micro-batches": 2}
TINY = [f"--{name}={size}" for name, size in SHAPE.items()]


def test_every_mode_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *TINY, "--output", str(target)]) == 0
    printed, wrong = capsys.readouterr()
    assert wrong == ""
    content = json.loads(target.read_text())
    assert [one["mode"] for one in content["plans"]] == ["torch", "plain", "release", "guard", "hold", "state", "blocks"]
    assert all(one["mode"] in printed and one["result"] in printed for one in content["plans"])
    assert content["shape"]["parameters"] == 2 * (4 * 16**2 + 3 * 16 * 24 + 2 * 16) + 2 * 11 * 16 + 16
    assert content["versions"]["torch"]
    assert content["training"]["micro_batches"] == 2
    assert content["training"]["kept"]["compensation"] == "int16"
    assert "StableAdamW with its defaults" in printed
    assert "4.78 thousand parameters in 2 layers" in printed
    assert "less than\n" in printed
    assert "--compensation stochastic keeps 6 bytes for each" in printed


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (12_345, "12.3 thousand"), (290_000_000, "290 million"), (6_738_415_616, "6.74 billion")]
)
def test_numbers_of_parameters_are_said_in_words(number: int, text: str) -> None:
    assert counted(number) == text


def test_it_needs_torch_only() -> None:
    """Neither JAX nor what draws reports. (`make package` runs it where only torch is installed.)"""
    absent = ["jax", "jaxlib", "optax", "matplotlib", "jinja2", "rich"]
    block = f"import sys\nfor name in {absent}: sys.modules[name] = None"
    code = f"{block}\nimport penstock.planner.plan, penstock.planner.report, penstock.parity.report, penstock.commands.plan"
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_one_mode_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--mode", "release", "--optimizer", "AdamW", "--compensation", "none"]) == 0
    printed, _ = capsys.readouterr()
    assert "AdamW(compensation='none')" in printed
    assert "stochastic" not in printed
    assert "release" in printed
    assert "guard" not in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layers", "0"], "layers=0"),
        (["--mode", "magic"], "mode 'magic' is not known"),
        (["--optimizer", "AdamW", "--state-dtype", "4bit", *TINY], "state_dtype"),
        (["--precision", "compact", "--compensation", "kahan", *TINY], "precision='compact' chooses compensation itself"),
        (["--output", "nowhere/plan.json"], "its directory does not exist"),
    ],
)
def test_bad_usage_is_a_sentence_and_status_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err
