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


def test_no_module_is_too_long_to_read() -> None:
    for folder in FOLDERS.values():
        for source in (ROOT / folder).rglob("*.py"):
            assert len(source.read_text().splitlines()) <= 600, source


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
