"""The public names of `sdsa_quant`: one table, which type checkers see the same way."""

from __future__ import annotations

import ast
from pathlib import Path

import sdsa_quant


def test_every_name_is_there() -> None:
    assert sdsa_quant.__all__ == sorted(sdsa_quant.__all__)
    for name in sdsa_quant.__all__:
        # Twice: a module of the same name would take the place of the first answer.
        assert getattr(sdsa_quant, name) is getattr(sdsa_quant, name)
        assert getattr(sdsa_quant, name).__name__ == name


def test_type_checkers_see_the_table() -> None:
    tree = ast.parse(Path(sdsa_quant.__file__).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == sdsa_quant._MODULES
