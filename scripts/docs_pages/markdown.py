"""Markdown that people read as text, too: padded tables, escaped cells."""

from __future__ import annotations

from collections.abc import Sequence


def cell(text: str) -> str:
    """`text` as one cell: on one line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 99) -> str:
    """A table; the first `left` columns are aligned left, the others right."""
    rules = [" --- " if column < left else " ---: " for column in range(len(headings))]
    lines = [f"| {' | '.join(map(cell, headings))} |", f"|{'|'.join(rules)}|"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(lines)
