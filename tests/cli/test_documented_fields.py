"""Every field of the documents of quantize-cache and inspect is on its page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdsa_quant.files.scores_file import ScoresWriter
from support.command_line import Run

REPORTS = Path(__file__).parents[2] / "docs" / "reference" / "reports"


def field_names(document: Any) -> set[str]:
    """Names of every field of a document, at any depth; free names of metadata left out."""
    if isinstance(document, dict):
        inner = [value for name, value in document.items() if name not in FREE_NAMES]
        return set(document).union(*map(field_names, inner))
    if isinstance(document, list):
        return set().union(*map(field_names, document))
    return set()


FREE_NAMES = ("packages", "header", "metadata")


@pytest.fixture
def documents(sdsa: Run, save_keys: Callable[..., Path], tmp_path: Path) -> list[Any]:
    keys, cache, scores = save_keys(count=100), tmp_path / "c.st", tmp_path / "s.st"
    written = sdsa("quantize-cache", keys, "-o", cache, "--json")
    numbers = torch.tensor([2], dtype=torch.int32)
    sizes = {"rows": 1, "max_context": 2, "top_k": 1}
    with ScoresWriter(scores, numbers, numbers, **sizes, source={}) as writer:
        writer.write_rows(0, torch.zeros(1, 2), torch.zeros(1, 1))
    inspected = [("inspect", file) for file in (keys, cache, scores)]
    inspected.append(("inspect", cache, "--page", "0"))
    return [written.document, *(sdsa(*words, "--json").document for words in inspected)]


def test_every_field_is_documented(documents: list[Any]) -> None:
    text = "".join((REPORTS / f"{name}.md").read_text() for name in ("quantize-cache", "inspect"))
    documented = set(re.findall(r"`(\w+)`", text))
    kinds = [document.get("kind") for document in documents]
    assert kinds == [None, "tensors", "cache", "scores", "page"]
    for document in documents:
        assert field_names(document) - documented == set()
