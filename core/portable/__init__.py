"""The portable optimizer state: a framework-neutral tree of arrays, its file, and the renaming between models."""
