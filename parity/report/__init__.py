"""The report: a JSON file with every row, an HTML page with figures, and (`terminal`, which needs rich) tables."""

from .document import SCHEMA, document, versions
from .files import prepare, write_json, write_page, write_whole

__all__ = [
    "SCHEMA",
    "document",
    "prepare",
    "versions",
    "write_json",
    "write_page",
    "write_whole",
]
