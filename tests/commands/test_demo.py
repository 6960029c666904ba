"""`penstock demo`: one tiny run from end to end, and every bad usage."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from penstock.__main__ import main
from penstock.commands import demo
from penstock.demonstration import demonstrate as demonstration
from penstock.demonstration.figure import check_output
from penstock.demonstration.results import Run
from penstock.demonstration.settings import ModelShape

TINY = ModelShape(width=16, layers=3, heads=2, context=16)
SOURCE = Path(__file__).resolve().parents[2] / "src"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several
    yield
    torch.set_num_threads(threads)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *arguments])


def test_a_tiny_demo_from_end_to_end(tmp_path, capsys) -> None:
    assert demo.run(parse("--steps", "3", "--output", "figure.png"), shape=TINY) == 0
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)
    printed, wrong = capsys.readouterr()
    for wanted in ("set_to_none=False", "set_to_none=True", "gradient release", "JAX", "MiB", "bitwise", "figure.png"):
        assert wanted in printed
    assert wrong == ""


def test_float64_gives_a_verdict(tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 4)
    assert demo.run(parse("--dtype", "float64", "--steps", "4", "--text", str(text)), shape=TINY) == 0
    assert "agreed: after 4 steps" in capsys.readouterr().out
    assert (tmp_path / "demo.png").exists()


def test_runs_that_do_not_agree_give_exit_status_1(monkeypatch, capsys) -> None:
    def train(*arguments) -> Run:
        run = original(*arguments)
        run.parameters["head"][0, 0] *= 1 + 1e-5
        return run

    original = demonstration.jax_run.train
    monkeypatch.setattr(demonstration.jax_run, "train", train)
    assert demo.run(parse("--dtype", "float64", "--steps", "2"), shape=TINY) == 1
    assert "NOT AGREED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "steps"),
        (["--steps", "-1"], "steps"),
        (["--steps", "many"], "steps"),
        (["--steps", "1.5"], "steps"),
        (["--dtype", "float16"], "dtype"),
        (["--device", "abacus"], "abacus"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--text", "empty.txt"], "empty.txt"),
        (["--text", "directory"], "directory"),
        (["--output", "directory"], "directory"),
        (["--output", "directory.png"], "is a directory"),
        (["--output", "nowhere/demo.png"], "nowhere"),
        (["--output", "demo.xyz"], "demo.xyz"),
        (["--unknown"], "unknown"),
        (["--device", "hpu"], "hpu"),
        (["--device", "privateuseone"], "privateuseone"),
        (["--device", ""], "''"),
        (["--device", "cpu:-1"], "cpu:-1"),
        (["--output", "/proc/demo.png"], "/proc/demo.png"),
        (["--output", "x" * 300 + ".png"], "too long"),
        (["--output", "a\0b.png"], "null byte"),
        (["--output", "pipe.png"], "not a regular file"),
        (["--text", "a\0b"], "null byte"),
        (["--text", "x" * 300], "too long"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_status_2(arguments, named, tmp_path, capsys) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    before = sorted(tmp_path.rglob("*"))
    try:
        status = main(["demo", *arguments])
    except SystemExit as exit_:
        status = exit_.code
    printed, wrong = capsys.readouterr()
    assert status == 2
    assert named in wrong
    assert wrong.count("\n") == 1
    assert printed == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_the_probe_leaves_an_existing_figure_as_it_is(tmp_path) -> None:
    file, link = tmp_path / "old.png", tmp_path / "link.png"
    file.write_bytes(PNG)
    link.symlink_to("new.png")
    check_output(file)
    check_output(link)
    assert file.read_bytes() == PNG
    assert link.is_symlink()
    assert not (tmp_path / "new.png").exists()


def test_a_figure_that_cannot_be_written_is_one_sentence_after_the_table(monkeypatch, capsys) -> None:
    def savefig(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    assert demo.run(parse("--steps", "1"), shape=TINY) == 2
    printed, wrong = capsys.readouterr()
    assert "gradient release" in printed
    assert "written:" not in printed
    assert wrong.startswith("penstock demo: the output 'demo.png' could not be written: ")
    assert "No space left on device" in wrong
    assert wrong.count("\n") == 1


def test_a_run_with_a_nan_does_not_agree() -> None:
    good = Run("good", [1.0], {"a": np.ones(2)}, 1.0)
    bad = Run("bad", [1.0], {"a": np.array([1.0, np.nan])}, 1.0)
    assert demonstration.verdict([good, good], 1, Console(quiet=True))
    assert not demonstration.verdict([good, good, bad], 1, Console(quiet=True))


def test_the_command_module_imports_no_framework() -> None:
    code = (
        "import sys, penstock.commands.demo, penstock.demonstration.settings;"
        "sys.exit(bool({'torch', 'jax', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
