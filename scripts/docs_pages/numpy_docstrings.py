"""Docstrings in the manner of NumPy, taken apart into sections and written as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap

_UNDERLINE = re.compile(r"^-{3,}$")
# Sections whose entries are "name : type" with an indented description.
_FIELDS = ("Parameters", "Returns", "Yields", "Raises", "Attributes")


def sections(docstring: str) -> list[tuple[str, str]]:
    """``(title, text)`` of each section; the first one has the title ``""``."""
    lines = inspect.cleandoc(docstring).split("\n")
    found: list[tuple[str, list[str]]] = [("", [])]
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        if line.strip() and _UNDERLINE.match(following):
            found.append((line.strip(), []))
        elif not _UNDERLINE.match(line):
            found[-1][1].append(line)
    return [(title, "\n".join(text).strip("\n")) for title, text in found]


def entries(text: str) -> list[tuple[str, str, str]]:
    """``(name, type, description)`` of each entry of a section of fields."""
    found: list[tuple[str, str, list[str]]] = []
    for line in text.split("\n"):
        if line and not line[0].isspace():
            name, _, kind = line.partition(" : ")
            found.append((name.strip(), kind.strip(), []))
        elif found:
            found[-1][2].append(line)
    return [(name, kind, textwrap.dedent("\n".join(lines)).strip()) for name, kind, lines in found]


def as_markdown(docstring: str) -> str:
    """A docstring as Markdown: paragraphs as they are, fields as lists."""
    written = []
    for title, text in sections(docstring):
        if title:
            written.append(f"**{title}**")
        if title in _FIELDS:
            written.append("\n".join(_item(*entry) for entry in entries(text)))
        elif text:
            written.append(code_marks(text))
    return "\n\n".join(written)


def first_line(docstring: str | None) -> str:
    """The first line of a docstring, as Markdown."""
    return code_marks(inspect.cleandoc(docstring or "").split("\n")[0])


def code_marks(text: str) -> str:
    """Double backticks made single, and ``\\[`` kept out of Markdown's way."""
    return text.replace("``", "`")


def _item(name: str, kind: str, description: str) -> str:
    kind = f" ({code_marks(kind)})" if kind else ""
    words = code_marks(" ".join(description.split()))
    return f"- `{name}`{kind}: {words}" if words else f"- `{name}`{kind}"
