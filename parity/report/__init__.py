"""The report: tables in the terminal, a JSON file with every row, and an HTML page with figures."""

from .document import SCHEMA, document, versions
from .files import prepare, write_json, write_page, write_whole
from .terminal import summary, tables

__all__ = [
    "SCHEMA",
    "document",
    "prepare",
    "summary",
    "tables",
    "versions",
    "write_json",
    "write_page",
    "write_whole",
]
