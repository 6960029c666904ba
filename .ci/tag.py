"""Refuse to publish a tag that is not the version, or a version that the changelog does not have with a date.

python .ci/tag.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def refusal(tag: str, package: str, changelog: str) -> str | None:
    """Return why a tag must not be published, or None.

    Args:
        tag: its name.
        package: text of src/penstock/__init__.py.
        changelog: text of CHANGELOG.md.
    """
    [version] = re.findall(r'^__version__ = "(.*)"$', package, re.MULTILINE)
    if tag != f"v{version}":
        return f"the tag is {tag!r}, and the version is {version!r}; tag v{version}, or change penstock.__version__."
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        return f"CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'."
    return None


if __name__ == "__main__":
    found = refusal(
        sys.argv[1] if len(sys.argv) > 1 else "",
        (ROOT / "src" / "penstock" / "__init__.py").read_text(encoding="utf-8"),
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    )
    sys.exit(found)
