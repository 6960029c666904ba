"""State that crosses frameworks: an optimizer's state to and from the files of `core.portable.file`."""

from .transfer import export_state, import_state

__all__ = ["export_state", "import_state"]
