"""The documentation as a whole: every example of every page runs, every link leads somewhere, and the site builds."""

from __future__ import annotations

import html.parser
import importlib
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import pages
from tests.support.examples import ROOT, examples, run

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
OUTSIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
RUN_BY = {
    "jax.md": "jax_frontend/models/test_jax_guide.py",
    "jax_libraries.md": "jax_frontend/models/test_libraries_guide.py",
    "jax_models.md": "jax_frontend/models/test_models_guide.py",
    "parity.md": "parity/test_kit.py",
    "portable_state.md": "test_portable_guide.py",
    "pytorch.md": "test_documents.py",
    "trainers.md": "torch_frontend/integrations/test_documentation.py",
}
"""Pages whose examples are tested together with what they describe; those of all others are run here."""

EXAMPLES = {(page, heading): text for page in PAGES if page not in RUN_BY for heading, text in examples(page).items()}


@pytest.mark.parametrize(("page", "heading"), EXAMPLES)
def test_examples_run(page: str, heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "import optax" in EXAMPLES[page, heading] or "import jax" in EXAMPLES[page, heading]:
        pytest.importorskip("optax")
    monkeypatch.chdir(tmp_path)
    run(heading, EXAMPLES[page, heading])


@pytest.mark.parametrize("page", PAGES)
def test_every_example_is_run_by_a_test(page: str) -> None:
    if page in RUN_BY:
        assert page in (ROOT / "tests" / RUN_BY[page]).read_text()
    else:
        assert (DOCS / page).read_text().count("```python") == len([key for key in EXAMPLES if key[0] == page])


def without_code(text: str) -> str:
    """Markdown without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(path: Path) -> set[str]:
    """The anchors that forges, and the site, give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*OUTSIDE, *(f"docs/{page}" for page in PAGES)])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{page}: {target}"
        assert page in OUTSIDE or DOCS in linked.parents, f"{page}: {target} is not a part of the site"
        assert not anchor or anchor in anchors(linked), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    for name in re.findall(
        r"`((?:tests|benchmarks|core|parity|torch_frontend|jax_frontend)/[\w./]+)`", (DOCS / page).read_text()
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["torch_frontend", "jax_frontend", "parity"])
def test_the_pages_of_the_api_have_exactly_the_public_names(name: str) -> None:
    text = (DOCS / "api" / f"{name}.md").read_text()
    listed = set(re.findall(r"^ +- (\w+)$", text, re.MULTILINE)) | set(re.findall(r"^::: \S+\.(\w+)\.\1$", text, re.MULTILINE))
    assert listed == set(importlib.import_module(f"penstock.{name}").__all__)


def test_the_other_pages_of_the_api_have_exactly_the_public_names() -> None:
    page = (DOCS / "public_names.md").read_text()
    errors, integrations = ((DOCS / "api" / f"{name}.md").read_text() for name in ("errors", "integrations"))
    section = page.split("## `penstock.core.errors`\n")[1].split("\n## ")[0]
    assert re.findall(r"^ +- (\w+)$", errors, re.MULTILINE) == re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    listed = [
        f"{module}.{name}"
        for module, names in re.findall(r"^::: (\S+)\n(.*?)(?=^#|\Z)", integrations, re.MULTILINE | re.DOTALL)
        for name in re.findall(r"^ +- (\w+)$", names, re.MULTILINE)
    ]
    assert listed == re.findall(r"^\| `(penstock\.torch_frontend\.integrations\.[\w.]+)` \|", page, re.MULTILINE)


@pytest.mark.parametrize(("name", "made"), [(pages.BENCHMARKS, pages.benchmarks_page), (pages.PARITY, pages.parity_page)])
def test_the_pages_of_figures_are_up_to_date(name: str, made: Callable[[], str]) -> None:
    assert (DOCS / name).read_text() == made(), "make it again: python -m benchmarks.pages"


def test_every_result_file_is_on_a_page() -> None:
    text = "".join((DOCS / page).read_text() for page in PAGES)
    assert not [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json") if path.stem not in text]


class References(html.parser.HTMLParser):
    """What a built page refers to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                (self.targets if tag == "a" else self.loaded).append(value)


@pytest.mark.exhaustive
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    """And every link between its pages leads to an anchor that is there."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path: References(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES)  # and the page for what was not found
    for path, page in pages.items():
        assert not [target for target in page.loaded if re.match(r"(https?:)?//", target)]
        for target in [*page.targets, *page.loaded]:
            split = urllib.parse.urlsplit(target)
            if split.scheme or target.startswith("/"):  # the page for what was not found has absolute links
                continue
            linked = (path.parent / urllib.parse.unquote(split.path)).resolve() if split.path else path
            linked = linked / "index.html" if linked.is_dir() else linked
            assert linked.exists(), f"{path.name}: {target}"
            assert not split.fragment or linked.suffix != ".html" or split.fragment in pages[linked].anchors, (
                f"{path}: {target}"
            )
