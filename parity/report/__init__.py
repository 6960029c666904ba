"""The report: tables for the terminal, a JSON file with every row, and one HTML page with figures, made from the same."""

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
