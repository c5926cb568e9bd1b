"""Import names, the direction of imports, and what works without the optional heavy libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"sdsa_quant": "quant", "sdsa_kernels": "kernels", "sdsa_cli": "sdsa_cli"}
MAY_IMPORT = {
    "sdsa_quant": {"sdsa_quant"},
    "sdsa_kernels": {"sdsa_quant", "sdsa_kernels"},
    "sdsa_cli": {"sdsa_quant", "sdsa_kernels", "sdsa_cli"},
}


def own_imports(source: Path) -> set[str]:
    """Packages of this project that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found & set(FOLDERS)


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_point_one_way(package: str) -> None:
    sources = list((ROOT / FOLDERS[package]).rglob("*.py"))
    assert sources
    for source in sources:
        assert own_imports(source) <= MAY_IMPORT[package], source


def test_the_emulator_knows_nothing_of_this_project() -> None:
    sources = list((ROOT / "tests" / "emulator").rglob("*.py"))
    assert sources
    for source in sources:
        assert own_imports(source) == set(), source


def test_every_module_is_in_a_listed_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-dir"] == FOLDERS
    packaged = set(project["tool"]["setuptools"]["packages"])
    found = set()
    for package, folder in FOLDERS.items():
        assert (ROOT / folder / "py.typed").is_file()
        for source in (ROOT / folder).rglob("*.py"):
            inner = source.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inner]))
            assert (source.parent / "__init__.py").is_file(), source
    assert packaged == found


MOST_LINES = 500
MOST_FILES = 18  # of Python in a folder


def test_no_module_is_too_long_to_read() -> None:
    for folder in FOLDERS.values():
        for source in (ROOT / folder).rglob("*.py"):
            assert len(source.read_text().splitlines()) <= MOST_LINES, source


def test_no_folder_is_too_full_to_know() -> None:
    for folder in FOLDERS.values():
        for package in (ROOT / folder).rglob("__init__.py"):
            assert len(list(package.parent.glob("*.py"))) <= MOST_FILES, package.parent


def module_files() -> dict[str, Path]:
    """Every module and package of the project by its dotted name."""
    found = {}
    for package, folder in FOLDERS.items():
        for source in (ROOT / folder).rglob("*.py"):
            inner = source.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *inner]).removesuffix(".__init__")] = source
    return found


def imported_modules(name: str, source: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the project that a module imports, inside functions too, but not for types."""
    package = name if source.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(source.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                outer = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*outer, *([node.module] if node.module else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(modules)
            found |= submodules or {base}
    return found & set(modules)


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; or none."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        path.append(name)
        for target in sorted(graph[name]):
            circle = visit(target)
            if circle:
                return circle
        finished.add(path.pop())
        return []

    return next((circle for name in graph if (circle := visit(name))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = module_files()
    graph = {name: imported_modules(name, modules[name], modules) for name in modules}
    assert sum(len(targets) for targets in graph.values()) > len(modules), "the graph is empty"
    assert find_circle(graph) == []


@pytest.mark.parametrize(
    ("graph", "circle"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
    ids=["none", "two", "itself"],
)
def test_circles_are_found(graph: dict[str, set[str]], circle: list[str]) -> None:
    assert find_circle(graph) == circle


def test_imports_are_seen_inside_functions_and_not_for_types(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "from . import b\n"
        "if TYPE_CHECKING:\n    from .c import C\n"
        "def f():\n    from .d import g\n    import p.e\n"
    )
    modules = {f"p.{name}": source for name in "abcde"}
    assert imported_modules("p.a", source, modules) == {"p.b", "p.d", "p.e"}


WITHOUT_KERNEL_LIBRARIES = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cutlass", "nvidia_cutlass_dsl", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import warnings
warnings.filterwarnings("ignore", message=".*[Nn]um[Pp]y.*")
import torch
from sdsa_kernels import indexer_scores
from sdsa_quant import quantize_nvfp4
keys = torch.eye(128)[:64].repeat(2, 1)
codes, scales = quantize_nvfp4(keys)
query = torch.arange(1, 129).bfloat16().view(1, 128)
scores = torch.zeros(1, 100)
indexer_scores(
    query, codes.view(2, 64, 64), torch.tensor([[1, 0]], dtype=torch.int32),
    torch.tensor([100], dtype=torch.int32), requests=torch.zeros(1, dtype=torch.int32),
    scores=scores, key_scales=scales.view(2, 64, 8),
)
# 6 * e4m3(1 / 6) is 1.03125
assert scores[0].tolist() == [1.03125 * (t % 64 + 1) for t in range(100)], scores
assert not {"triton", "cutlass"} & set(sys.modules)
print("scored")
"""


def test_cpu_path_works_without_the_kernel_libraries() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNEL_LIBRARIES], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "scored\n"


def test_importing_the_kernels_loads_no_kernel_library() -> None:
    code = (
        "import sys, sdsa_kernels, sdsa_quant;"
        "assert not {'triton', 'cutlass'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
