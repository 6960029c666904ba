import base64
import dataclasses
import html.parser
import json
import math
import pathlib
import re
import xml.etree.ElementTree

import numpy as np
import pytest

from penstock.parity import register, unregister
from penstock.parity.backends import choose
from penstock.parity.backends.specification import NumpyBackend, NumpyRun
from penstock.parity.cases import Case
from penstock.parity.compare import Refusal, Row, differing, failed, identical
from penstock.parity.report import document, write_json, write_page
from penstock.parity.report.terminal import summary, tables
from penstock.parity.sections import select
from penstock.parity.suite import Result, SectionResult, run_sections

pytest.importorskip("matplotlib")

HOSTILE = "<script>alert('[bold]\"&')</script>"


class Hostile(NumpyBackend):
    """Its decay is lost and its name is markup."""

    name = HOSTILE

    def start(self, case: Case) -> NumpyRun:
        if case.problem.dtype == "float64":
            raise RuntimeError(HOSTILE)
        setting = dataclasses.replace(case.problem.setting, weight_decay=0.0)
        return NumpyRun(dataclasses.replace(case, problem=dataclasses.replace(case.problem, setting=setting)))


class Page(html.parser.HTMLParser):
    """What a page is made of: its tags with their attributes, and its text."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.raw = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def result() -> Result:
    """A run in which a backend breaks bounds and raises, with rows of further kinds."""
    register(Hostile())
    try:
        found = run_sections(choose(["numpy", HOSTILE])[0], select("B/adamw/float*/none/*"), [1, 20])
    finally:
        unregister(HOSTILE)
    extra = SectionResult(
        select("updates")[0][0],
        [
            differing("differences/adamw/float32", "numpy", HOSTILE, 1, "parameter", 3, 731),
            differing("differences/adamw/float32", "numpy", "eager", 1, "exp_avg", 0, 731),
            differing("differences/adamw/float32", "eager", HOSTILE, 1, "exp_avg", 731, 731),
            identical("identity/repeat/adamw", "numpy", 1, "parameter", np.zeros(3), np.array([0.0, -0.0, 0.0])),
            dataclasses.replace(
                identical("memory/release", "numpy", 1, "peak, measured", np.zeros(1), np.zeros(1)),
                data={"policy": "release", "found": 4096, "expected": 4096, "timeline": [["b", 0], ["a", 4096]]},
            ),
            failed("events/hold", HOSTILE, 1, RuntimeError(HOSTILE)),
        ],
        [Refusal("events/hold", "numpy", HOSTILE)] * 3,
        {"numpy": 0.5},
    )
    return dataclasses.replace(found, sections=[*found.sections, extra])


@pytest.fixture(scope="module")
def page(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Page:
    content = document(result, version="0", command=["penstock", HOSTILE], not_available={HOSTILE: HOSTILE})
    written = write_page(tmp_path_factory.mktemp("report"), content)
    return Page(written.read_text())


def test_the_page_is_whole_and_loads_nothing(page: Page) -> None:
    assert page.open == []
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not any("@import" in text or "http:" in text or "https:" in text for text in (page.text,))
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name.split(":")[-1] in ("href", "src", "srcset", "action"):
                assert value is not None
                assert value.startswith(("#", "data:image/svg+xml;base64,")), (tag, name, value[:80])
            assert "http" not in (value or ""), (tag, name)


def test_links_and_ids_of_the_page_meet(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    targets = {value[1:] for _, attributes in page.tags if (value := attributes.get("href") or "").startswith("#")}
    others = [name for name in ids if not str(name).startswith("section-")]  # the document has one section twice
    assert len(others) == len(set(others))
    assert targets <= set(ids)


def test_the_page_can_be_read_aloud(page: Page) -> None:
    assert ("html", {"lang": "en"}) in page.tags
    tables = sum(tag == "table" for tag, _ in page.tags)
    assert tables == sum(tag == "caption" for tag, _ in page.tags)
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in page.tags if tag == "th")
    drawings = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(drawings) == 3
    for attributes in drawings:
        assert attributes["alt"]
        drawn = base64.b64decode((attributes["src"] or "").partition(",")[2]).decode()
        xml.etree.ElementTree.fromstring(drawn)
        assert not re.search(r"<script|href=\"(?!#|data:image/png;base64,)", drawn)


def test_every_broken_row_is_named_on_the_page_and_in_the_terminal(result: Result, page: Page) -> None:
    assert len(result.broken) >= 5
    sentences = summary(result)
    table = page.raw.partition('<section id="broken">')[2].partition("</section>")[0]
    assert table.count("<tr>") == 1 + len(result.broken)
    for row in result.broken:
        assert row.case in table
        assert any(sentence.startswith(f"{row.case} on {row.backend} after {row.steps} steps") for sentence in sentences)
    assert f"{len(result.broken)} of {sum(row.judged for row in result.rows)} comparisons break their bounds" in page.text


def test_hostile_names_are_text(page: Page) -> None:
    assert page.text.count(HOSTILE) >= 5  # a column's header, a cell, a failure, a reason, the command


def test_hostile_names_are_text_in_the_terminal_too(result: Result) -> None:
    from rich.console import Console

    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        for table in tables(result):
            console.print(table)
    text = console.export_text()
    assert text.count(HOSTILE) >= 3
    assert "script" not in text.replace(HOSTILE, "")


def test_refusals_are_told_by_reason(result: Result) -> None:
    (sentence,) = [sentence for sentence in summary(result) if "did not run" in sentence]
    assert sentence == f"numpy did not run 3 cases of updates, such as events/hold: {HOSTILE}."


def test_the_last_sentence_counts_by_backend(result: Result) -> None:
    own = {row.backend for row in result.rows if row.judged} - set(result.peers)
    total, _, by_backend = summary(result)[-1].partition(" By backend: ")
    counted = re.findall(r"(\d+) of (\d+)(?:[,.]|$)", by_backend)
    assert all(name in by_backend for name in own)
    assert [sum(map(int, column)) for column in zip(*counted, strict=True)] == [int(n) for n in re.findall(r"\d+", total)[:2]]


def test_rows_for_information_are_not_judged(result: Result) -> None:
    row, *_ = [row for row in result.rows if row.case.startswith("differences/")]
    assert not row.judged
    assert row.within
    assert row.as_json()["within"] is None


def test_bits_are_compared(result: Result) -> None:
    (row,) = [row for row in result.rows if row.case.startswith("identity/")]
    assert not row.within  # minus zero is equal to zero, but not the same
    assert row.units == 1
    assert row.relative_error == pytest.approx(1 / 3)


def test_a_row_of_the_json_is_a_line(result: Result, tmp_path: pathlib.Path) -> None:
    content = document(result, version="0", command=[], not_available={})
    text = write_json(tmp_path, content).read_text()
    assert json.loads(text) == content
    assert sum(line.lstrip().startswith('{"case"') for line in text.splitlines()) == len(result.rows)


def test_the_ratio_is_that_of_the_nearest_bound() -> None:
    nan = math.nan
    assert Row("c", "b", 1, "parameter", 1.0, 4.0, 1.0, 2.0, 0.5).ratio == 0.5
    assert Row("c", "b", 1, "parameter", 3.0, 4.0, 1.0, 2.0, 0.5).ratio == 0.75
    assert Row("c", "b", 1, "parameter", nan, 4.0, nan, 2.0, nan).ratio == math.inf
    assert Row("c", "b", 1, "parameter", 0.0, 0.0, 0.0, 0.0, 0.0).ratio == 0.0
    assert Row("c", "b", 1, "parameter", 1.0, 0.0, 1.0, 0.0, math.inf).ratio == math.inf
