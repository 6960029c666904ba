"""The parts of the metadata that are read from other files. Everything else is in pyproject.toml.

The version is `penstock.__version__`. Links of the README that point into the repository mean nothing in a package: where the
environment names the repository, PENSTOCK_REPOSITORY=https://..., they point there, at the tag of this version, and the
package's project URLs are set; without it they become plain text with the path.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
[VERSION] = re.findall(r'^__version__ = "(.*)"$', (ROOT / "src/penstock/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
REPOSITORY = os.environ.get("PENSTOCK_REPOSITORY", "").rstrip("/")
URLS = {"Repository": "", "Changelog": "blob/HEAD/CHANGELOG.md", "Documentation": "blob/HEAD/docs/index.md", "Issues": "issues"}
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:)([^)]+)\)")


def readme(text: str, repository: str, version: str) -> str:
    """Return the README with its links into the repository made absolute, or made text where its address is not known."""

    def linked(match: re.Match[str]) -> str:
        image, name, path = match.groups()
        if repository:
            return f"{image}[{name}]({repository}/{'raw' if image else 'blob'}/v{version}/{path})"
        return name if image else f"{name} (`{path}`)"

    return LINK.sub(linked, text)


if __name__ == "__main__":
    setup(
        version=VERSION,
        long_description=readme((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY, VERSION),
        long_description_content_type="text/markdown",
        project_urls={name: f"{REPOSITORY}/{path}".rstrip("/") for name, path in URLS.items()} if REPOSITORY else {},
    )
