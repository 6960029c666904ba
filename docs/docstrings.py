"""What the pages of the API do not take from docstrings as they are. MkDocs loads it (mkdocs.yml)."""

from __future__ import annotations

from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Removes fields of named tuples, which their class describes, and escapes what Markdown would take for a link."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Remove the attributes that `typing.NamedTuple` documents as "Alias for field number 0"."""
        for name, member in list(cls.members.items()):
            if not member.is_alias and member.docstring is not None and member.docstring.value.startswith("Alias for field"):
                cls.del_member(name)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Escape the bracket between two optional arguments, "f(x[, y][, z])", which Markdown reads as a link."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("][", "]\\[")
