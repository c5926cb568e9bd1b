"""The English of what the product says: no message runs two sentences together with a comma."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path for folder in ("quant", "kernels", "sdsa_cli") for path in ROOT.glob(f"{folder}/**/*.py")
]

# A clause of its own after a comma, without a word that joins it to the one before.
SPLICE = re.compile(
    r"must be [^,;:]*, (?:(?:row|key|tensor|field) \S+ (?:of \w+ \S+ )?(?:is|has|does)\b)"
    r"|, (?:it|this|they|there|these|those) (?:is|are|was|were|cannot|must|has|have|does|do|can)\b"
    r"|, the \w+(?: \w+)? (?:is|are|has|have|holds|needs|cannot)\b"
)
OTHERS = {
    "is no": re.compile(r"(?<!there )\bis no (?!better|worse|longer|more|less)[a-z]"),
    "but for": re.compile(r"\bbut for\b"),
    "a sdsa": re.compile(r"\ba (?:sdsa|\{wanted\})\b"),
    "place": re.compile(r"\bat place \d"),
}


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a file that is not a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = [
                str(part.value) if isinstance(part, ast.Constant) else "{x}" for part in node.values
            ]
            yield node.lineno, "".join(words)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs | parts
        ):
            yield node.lineno, node.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_are_sentences(path: Path) -> None:
    for line, text in messages(path):
        found = SPLICE.search(text)
        # After "where", "if" and the like, a comma parts a clause from its main one.
        if found and not re.search(
            r"\b(?:where|if|when|because|as|since)\b", text[: found.start()]
        ):
            pytest.fail(f"line {line}: two sentences in one: {text}")
        for name, pattern in OTHERS.items():
            assert not pattern.search(text), f"line {line}: {name}: {text}"


@pytest.mark.parametrize(
    "text",
    [
        "x: is the input, it cannot be the output too",
        "tensor k must be finite, row {x} is not",
        "NVFP4 query rows go with NVFP4 keys only, the cache holds BF16 keys",
    ],
)
def test_the_pattern_finds(text: str) -> None:
    assert SPLICE.search(text)
