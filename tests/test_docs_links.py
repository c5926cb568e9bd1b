"""Every relative link of every page leads to a file and, where it names one, a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SKIPPED = {"build", "out", "node_modules"}
PAGES = sorted(
    page.relative_to(ROOT)
    for page in ROOT.rglob("*.md")
    if not SKIPPED & set(page.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)


def without_code(text: str) -> str:
    """A page's text without code blocks, whose brackets are not links."""
    return re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchor, count = kept, 0
        while anchor in found:
            count += 1
            anchor = f"{kept}-{count}"
        found.add(anchor)
    return found


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (
            anchor and anchor not in anchors(file.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    return broken


def test_there_are_pages() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/reference/cache-format.md"} <= {
        page.as_posix() for page in PAGES
    }


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(ROOT / page) == []


def test_a_wrong_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading, here\n[a](#a-heading-here) [b](#other) [c](missing.md)\n")
    assert broken_links(page) == ["#other", "missing.md"]
