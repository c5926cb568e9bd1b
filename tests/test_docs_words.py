"""What pages speak of exists, words have a home, and the English is what STYLE asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_docs_links import PAGES, ROOT, without_code

WORDS = (
    *("key", "query row", "group", "request", "context length", "index", "heads", "weights"),
    *("selection", "page", "block table", "record", "layout", "format", "format pair", "codes"),
    *("scales", "block", "scale order", "rule", "transform", "calibration", "slot", "capture"),
    *("score", "backend", "variant", "plan", "share", "chunk"),
)
# Paths that pages name in backticks: from the root, or from a folder that their page is about.
BASES = ("", "kernels/", "quant/", "sdsa_cli/", "tests/", "tests/emulator/")
NAMED = re.compile(
    r"`((?:quant|kernels|sdsa_cli|tests|scripts|benchmarks|docs|fixtures|triton|cute|probes"
    r"|\.ci)/[\w./*-]*)`"
)
MADE_BY_SCRIPTS = ("docs/reference/reports/", "docs/reference/python.md", "docs/reference/cli.md")
AVOIDED = {
    "but for": "except",
    "held against": "compared with",
    "is no ": "is not a",
    "at place ": "at index",
}


@pytest.mark.parametrize("package", ["quant", "kernels", "sdsa_cli"])
def test_the_map_has_every_folder(package: str) -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    part = text.partition(f"    {package}/  ")[2].partition("\n\n")[0]
    folders = {folder.parent.name for folder in (ROOT / package).rglob("__init__.py")} - {package}
    assert folders
    assert {name for name in folders if f"{name}/" not in part} == set()


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_a_line(word: str) -> None:
    text = (ROOT / "docs/reference/words.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    assert sum(f"*{word}*" in name for name in names) == 1


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in NAMED.findall(text):
        found = any(
            (ROOT / base / name).exists() or ("*" in name and any(ROOT.glob(base + name)))
            for base in BASES
        )
        assert found, name


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_scripts_and_commands_that_a_page_names_exist(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(
        r"^(?: {4}|    \$ )?((?:scripts|benchmarks|\.ci)/[\w-]+(?:\.py)?)", text
    ):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"`sdsa ([a-z][a-z-]+)", text):
        assert f"## `sdsa {name}`" in (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.as_posix().startswith(MADE_BY_SCRIPTS)], ids=str
)
def test_pages_are_written_as_a_native_editor_leaves_them(page: Path) -> None:
    text = " ".join(without_code((ROOT / page).read_text(encoding="utf-8")).split())
    for phrase, better in AVOIDED.items():
        for found in re.finditer(rf"\b(\w+ )?{phrase}(\w+)?", text):
            if str(found[1]).lower() == "there " or found[2] in (
                "better",
                "longer",
                "more",
                "worse",
                "less",
            ):
                continue
            pytest.fail(f"{found[0]!r}: say {better}")
