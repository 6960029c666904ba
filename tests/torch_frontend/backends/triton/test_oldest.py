"""The kernels keep to what Triton 3.2 understands, the oldest supported one: torch 2.6 brings it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock.torch_frontend.backends.triton as folder

NAMES = """
abs add arange atomic_add bfloat16 cdiv constexpr debug_barrier exp float16 float32 float64 floor int16 int32 int64 int8 load
log max maximum minimum multiple_of num_programs pointer_type program_id range reshape sqrt store sum uint16 uint32 uint8 where
zeros zeros_like
"""
"""Names of triton.language that the kernels may use; there is no `mul`, which is in triton.language.core."""


def compiled_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(Path(folder.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(by) for by in node.decorator_list):
                yield f"{path.name}: {node.name}", node


FUNCTIONS = dict(compiled_functions())


def test_the_kernels_are_found() -> None:
    assert {"kernels.py: update_group", "kernels.py: update_tensor", "rounding.py: _mix"} <= set(FUNCTIONS)


def test_kernels_use_only_what_triton_3_2_has() -> None:
    used = {
        node.attr
        for function in FUNCTIONS.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tl"
    }
    assert "load" in used
    assert used <= set(NAMES.split())


def test_constants_are_compared_from_the_left() -> None:
    """A dtype on the left is silently unequal to a constant on the right; a plain number there cannot be compared."""
    assert backwards("def f(): return pointer.dtype == 8, tl.int8 == CODES") == ["pointer.dtype == 8", "tl.int8 == CODES"]
    assert not [name for name, function in FUNCTIONS.items() if backwards(ast.unparse(function))]


def backwards(source: str) -> list[str]:
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [ast.unparse(node) for node in compared if isinstance(node.left, ast.Attribute) and is_constant(node.comparators[0])]


def is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or ast.unparse(node).isupper()
