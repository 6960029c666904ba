"""The package: what an extra installs, one version, the README, what is published and when, and what the sdist holds."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_TORCH, OF_JAX = {"torch", "triton"}, {"jax", "jaxlib", "optax", "flax", "equinox", "orbax-checkpoint"}
OF_THE_SITE = {"mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python"}
SETUP = ROOT / "setup.py"


def loaded(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def installed_by(extra: str | None) -> set[str]:
    """The names of all packages that penstock installs with an extra, by the metadata of those that are installed here."""
    waiting, found = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])], set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": each}) for each in ("", *requirement.extras)):
            continue
        if name == "penstock":
            waiting += [each for extra in requirement.extras for each in PROJECT["optional-dependencies"][extra]]
        elif name not in found:
            found.add(name)
            waiting += [line for line in requirements_of(name) if "extra ==" not in line]
    return found


@functools.cache
def requirements_of(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


@pytest.mark.parametrize(
    ("extra", "with_it", "without"),
    [
        (None, {"numpy", "safetensors"}, OF_TORCH | OF_JAX | {"rich", "matplotlib"}),
        ("torch", {"torch"}, OF_JAX | {"rich", "matplotlib"}),
        ("jax", {"jax", "optax"}, OF_TORCH | {"rich", "matplotlib"}),
        ("trainers", {"transformers", "lightning"}, OF_JAX),
        ("models", {"flax", "equinox"}, OF_TORCH),
        ("parity", {"torch", "jax", "rich", "matplotlib"}, set()),
    ],
)
def test_an_extra_installs_what_it_says_and_nothing_of_the_other_framework(
    extra: str | None, with_it: set[str], without: set[str]
) -> None:
    found = installed_by(extra)
    assert with_it <= found
    assert not found & (without | OF_THE_SITE)


def test_the_site_is_an_extra_of_its_own() -> None:
    assert {"mkdocs-material", "mkdocstrings"} <= installed_by("docs")


def test_there_is_one_version() -> None:
    assert "version" not in PROJECT
    assert penstock.__version__ == loaded(SETUP).VERSION
    assert "version:" not in re.sub("cff-version:", "", (ROOT / "CITATION.cff").read_text())


def test_links_of_the_packages_readme_are_absolute_or_text() -> None:
    setup, text = loaded(SETUP), (ROOT / "README.md").read_text()
    assert "](docs/" in text
    assert not re.findall(r"\]\((?!https?:)|!\[", setup.readme(text, "", "1.2"))
    absolute = setup.readme(text, "https://example.org/penstock", "1.2")
    assert "](https://example.org/penstock/blob/v1.2/docs/pytorch.md)" in absolute
    assert "](https://example.org/penstock/raw/v1.2/docs/bench.png)" in absolute  # a picture, not a page with one
    assert len(re.findall(r"\]\(https?:", absolute)) == text.count("](")


CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "text"),
    [
        ("v1.2.0", CHANGELOG, None),
        ("v1.2.1", CHANGELOG, "the tag is 'v1.2.1', and the version is '1.2.0'"),
        ("1.2.0", CHANGELOG, "tag v1.2.0"),
        ("", CHANGELOG, "the tag is ''"),
        ("v1.2.0", "## [1.2.0] - Unreleased\n", "CHANGELOG.md has no line '## [1.2.0] - YYYY-MM-DD'"),
    ],
)
def test_only_the_version_with_a_dated_entry_is_published(tag: str, changelog: str, text: str | None) -> None:
    found = loaded(ROOT / ".ci" / "tag.py").refusal(tag, '__version__ = "1.2.0"\n', changelog)
    assert found is None if text is None else text in found


def test_the_changelog_describes_the_version() -> None:
    entries = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] in ("Unreleased", penstock.__version__)


def test_the_workflows_run_make_targets_and_publish_after_all_of_them() -> None:
    yaml = pytest.importorskip("yaml")
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = {row["target"] for row in workflows["checks"]["jobs"]["make"]["strategy"]["matrix"]["include"]}
    assert {"lint", "test", "test-oldest", "test-newest", "docs", "package"} == run <= targets
    jobs = workflows["release"]["jobs"]
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert all(re.match(r"make ([\w-]+)", command)[1] in targets for command in commands)  # type: ignore[index]
    assert commands[0].startswith("make tag ")
    assert jobs["publish"]["needs"] == ["checks", "build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.exhaustive
def test_the_sdist_holds_every_file_but_links(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("which files there are is asked of git")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in tracked:
        target = tmp_path / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    code = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "copy", capture_output=True, text=True, check=True)
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not {name for name in tracked if not (ROOT / name).is_symlink()} - held
