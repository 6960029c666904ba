"""The guides: their examples run as they stand, what is generated is up to date, and what they name exists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from typing import Any

import pytest
from benchmarks.live_gradients import local_paths, markdown, measure
from tests.support.examples import ROOT, examples, run

from penstock import jax_frontend, torch_frontend
from penstock.core import combinations_page
from penstock.core.rules import RULES
from penstock.planner.settings import Training
from penstock.torch_frontend import Muon, Release, microbatch_blocks, param_groups_for_muon, release_gradients

GUIDE = (ROOT / "docs" / "pytorch.md").read_text()
EXAMPLES = examples("pytorch.md")
PUBLIC = [name for name in RULES if hasattr(jax_frontend, name)]


@pytest.mark.parametrize("section", EXAMPLES)
def test_examples_run(section: str) -> None:
    run(section, EXAMPLES[section])


def test_every_rule_is_one_that_users_know_or_a_variant_of_one() -> None:
    known = {RULES[name] for name in PUBLIC}
    assert all(any(rule.is_of_one_kind_with(public) for public in known) for rule in RULES.values())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_rules_docstrings_have_each_argument_once(name: str) -> None:
    of_torch = next(kind for kind in vars(torch_frontend).values() if getattr(kind, "rule", None) is RULES[name])
    for documented in (of_torch, getattr(jax_frontend, name)):
        text = inspect.getdoc(documented) or ""
        described = re.findall(r"^ {4}(\w+): ", text.split("Args:")[1].split("Raises:")[0], re.MULTILINE)
        assert described == list(inspect.signature(documented).parameters)
        assert not re.search(r"(\w+): +\1: ", text)


def test_every_example_was_found() -> None:
    assert len(EXAMPLES) == GUIDE.count("```python") == 8


def test_the_table_of_combinations_is_up_to_date() -> None:
    text = (ROOT / "docs" / "combinations.md").read_text()
    assert text == combinations_page.markdown(), f"make it again: {combinations_page.COMMAND}"


def test_the_live_gradients_of_one_process_are_up_to_date() -> None:
    """Those of several processes are measured by the command, and their laws tested over ranks."""
    text = (ROOT / "docs" / "live_gradients.md").read_text()
    for line in markdown([measure(path) for path in local_paths()]).splitlines():
        assert line in text, f"make it again: python -m benchmarks.live_gradients --write docs/live_gradients.md ({line})"


def test_the_planned_figures_are_the_recorded_ones() -> None:
    """The records are of the defaults but for what their names say; the guide's table has the numbers of one of them."""
    plans: dict[str, Any] = {}
    recorded: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plan_llama_7b", {}),
        ("plan_llama_7b_uncompensated", {"compensation": "none"}),
        ("plan_llama_7b_batch_4", {"batch": 4, "micro_batches": 4}),  # the guide's table
    )
    for name, settings in recorded:
        content = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        training = Training(**settings)
        assert content["training"] == {**dataclasses.asdict(training), "kept": training.kept, "kept_bytes": training.kept_bytes}
        plans = {plan["mode"]: plan for plan in content["plans"]}
    for line, mode in re.findall(r"^(\| (torch|plain|release|hold|state|blocks)[., ].*\|)$", GUIDE, re.MULTILINE):
        if line.count("|") != 5 or not re.search(r"\d\.\d\d", line):
            continue
        plan = plans.pop(mode)
        gradients = plan["by_kind"]["gradients"] if plan["ledger"] is None else plan["ledger"]
        assert f"| {plan['peak'] / 2**30:.2f} | {gradients / 2**30:.2f} |" in line
    assert set(plans) == {"guard"}  # which equals release


def test_settings_and_files_that_it_names_exist() -> None:
    arguments = [
        set(inspect.signature(f).parameters) for f in (release_gradients, microbatch_blocks, Muon, param_groups_for_muon)
    ]
    known = set().union(*arguments, {"use_cache"})
    for name in re.findall(r"`(\w+)=", GUIDE):
        assert name in known, name
    for target in re.findall(r"\]\((\w+\.md)\)", GUIDE):
        assert (ROOT / "docs" / target).exists(), target


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = [name for name in re.findall(r"`([\w./-]+/[\w./-]*)`", text) if "<" not in name]
    assert len(named) > 20
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "torch_frontend" / name).exists()]
    assert not missing


@pytest.mark.parametrize("module", ["penstock.torch_frontend", "penstock.jax_frontend", "penstock.parity"])
def test_the_page_of_public_names_lists_exactly_those(module: str) -> None:
    page = (ROOT / "docs" / "public_names.md").read_text()
    section = page.split(f"## `{module}`\n")[1].split("\n## ")[0]
    assert (
        re.findall(r"^\| `(\w+)` \| (?:stable|provisional) \|", section, re.MULTILINE)
        == importlib.import_module(module).__all__
    )


def test_a_release_has_no_public_names_that_the_page_does_not_list() -> None:
    page = (ROOT / "docs" / "public_names.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `Release` | `guard`"))
    listed = set(re.findall(r"`(\w+)`", row)) - {"Release"}
    assert {name for name in (*vars(Release), "optimizer") if not name.startswith("_")} == listed
