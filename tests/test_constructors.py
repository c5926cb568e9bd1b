"""No tensor of the library depends on the caller's default dtype or default device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Those that take the default dtype or device where none is given.
CONSTRUCTORS = {
    "arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def constructors(path: Path) -> Iterator[tuple[int, str, set[str | None]]]:
    """Line, name and keywords of each call of ``torch.NAME`` that makes a tensor."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in CONSTRUCTORS
        ):
            yield node.lineno, node.func.attr, {keyword.arg for keyword in node.keywords}


def test_every_constructor_has_a_dtype_and_a_device() -> None:
    found, faults = 0, []
    for folder in ("quant", "kernels", "sdsa_cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, name, keywords in constructors(path):
                found += 1
                if not keywords >= {"dtype", "device"}:
                    faults.append(f"{path.relative_to(ROOT)}:{line} torch.{name}")
    assert found > 100
    assert faults == []
