"""The house: who may import whom, that every package is in the wheel, and what an import pulls in."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "torch_frontend", "jax_frontend", "planner", "demonstration", "parity")
FRAMEWORKS = {"torch", "jax", "jaxlib", "optax", "triton"}
SIBLINGS = {
    "core": set(),
    "torch_frontend": {"core"},
    "jax_frontend": {"core"},
    "planner": {"core", "torch_frontend"},
    "demonstration": {"core", "torch_frontend", "jax_frontend", "planner"},
    "parity": {"core", "torch_frontend", "jax_frontend", "planner", "demonstration"},
}
OUTSIDE = {
    "core": set(),
    "torch_frontend": {"torch", "triton"},
    "jax_frontend": {"jax", "jaxlib", "optax"},
    "planner": {"torch"},
    "demonstration": {"torch", "jax"},
    "parity": FRAMEWORKS,
}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def own_modules(name: str) -> set[str]:
    """The modules of this house that a module imports, at its top or in a function; not those that only type checkers see."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = tree_of(path)
    guards = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"
    ]
    for_checkers = {node for guard in guards for statement in guard.body for node in ast.walk(statement)}
    found = set()
    for node in ast.walk(tree):
        if node not in for_checkers and isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            found |= {each for alias in node.names if (each := f"{base}.{alias.name}") in MODULES} or {base} & set(MODULES)
    return found - {name}


def imports(path: Path) -> set[str]:
    """The top-level packages and the sibling folders that a file imports, wherever in the file it does."""
    inside = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                found.add((node.module or "").split(".")[0])  # "penstock" itself is refused below: siblings are relative
                continue
            up = inside[: len(inside) - (node.level - 1)]
            target = [*up, *(node.module or "").split(".")] if node.module else list(up)
            names = [target[0]] if target and target[0] else [alias.name for alias in node.names]
            found |= {f"<{name}>" for name in names}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_the_right_way(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        found = imports(path)
        siblings = {name.strip("<>") for name in found if name.startswith("<")} & set(FOLDERS) - {folder}
        assert siblings <= SIBLINGS[folder], f"{path} imports {siblings}"
        assert found & FRAMEWORKS <= OUTSIDE[folder], f"{path} imports {found & FRAMEWORKS}"
        assert not found & set(FOLDERS), f"{path} imports a root folder as a top-level package"
        assert "penstock" not in found, f"{path} imports a sibling absolutely; use `from ..core import ...`"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: own_modules(name) for name in MODULES}
    order = graphlib.TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the modules


def documented(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def test_a_public_method_without_a_docstring_has_one_in_what_it_implements() -> None:
    """In a protocol or base class of this house, or in PyTorch's own (forward, backward, step)."""
    trees = [tree_of(path) for path in MODULES.values()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = [(each, method) for each in classes for method in each.body if isinstance(method, ast.FunctionDef)]
    described = {method.name for _, method in methods if documented(method)} | {"forward", "backward"}
    silent = [(each.name, method.name) for each, method in methods if not documented(method)]
    assert not [pair for pair in silent if pair[1] not in described and not any(name.startswith("_") for name in pair)]


def test_every_package_is_declared() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "penstock." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    found |= {
        ".".join(path.parent.relative_to(ROOT / "src").parts)
        for path in (ROOT / "src" / "penstock").glob("*/__init__.py")
        if not path.parent.is_symlink()
    }
    assert set(setuptools["packages"]) == {"penstock"} | found
    assert {f"penstock.{folder}" for folder in FOLDERS} <= set(setuptools["package-dir"])


def test_every_folder_with_code_is_a_package() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} would drop out of the wheel"


def test_nobody_imported_a_root_folder_as_top_level() -> None:
    assert not {module for module in sys.modules if module.split(".")[0] in FOLDERS}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def loaded_after(code: str) -> set[str]:
    done = run_python(f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    assert not loaded_after("import penstock") & (FRAMEWORKS | {"numpy"})
    assert not loaded_after("import penstock.__main__") & FRAMEWORKS
    assert not loaded_after("import penstock.core.update, penstock.core.reference, penstock.core.release") & FRAMEWORKS


@pytest.mark.parametrize(
    ("frontend", "absent"),
    [("torch_frontend", ("jax", "jaxlib", "optax", "triton")), ("jax_frontend", ("torch", "triton"))],
)
def test_a_frontend_imports_without_the_other_framework(frontend: str, absent: tuple[str, ...]) -> None:
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    assert not loaded_after(f"{block}import penstock.{frontend}\nfor name in {absent!r}: del sys.modules[name]") & set(absent)


def test_importing_the_torch_frontend_leaves_the_compiler_out_and_an_eager_optimizer_the_kernels() -> None:
    """The compiler takes longer than all the rest. An optimizer may make torch import Triton."""
    make = "penstock.torch_frontend.AdamW([torch.zeros(2)], backend='eager')"
    done = run_python(f"import sys, torch, penstock.torch_frontend\nprint(*sys.modules)\n{make}\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    imported, used = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"torch._dynamo", "torch._inductor", "triton"} & imported
    assert not {name for name in used if name.endswith("backends.triton.kernels")}


@pytest.mark.parametrize(
    ("frontend", "absent", "extra"),
    [
        ("torch_frontend", "torch", "pip install '.[torch]'"),
        ("jax_frontend", "jax", "pip install '.[jax]'"),
        ("jax_frontend", "optax", "[jax]"),
    ],
)
def test_a_missing_framework_names_the_extra(frontend: str, absent: str, extra: str) -> None:
    done = run_python(f"import sys\nsys.modules[{absent!r}] = None\nimport penstock.{frontend}")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError" in last
    assert extra in last
