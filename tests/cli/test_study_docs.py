"""docs/how-to/choose-a-format.md: its tables are what the study gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Run

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "choose-a-format.md"
TEXT = PAGE.read_text(encoding="utf-8")


def tables() -> list[dict[tuple[str, str], float]]:
    """Both tables of recall, as numbers by format and transform."""
    found = []
    for block in re.findall(r"\| transform \| bf16 .*?\n\n", TEXT, re.DOTALL):
        heading, _, *lines = [
            [cell.strip() for cell in line.strip("|\n").split("|")]
            for line in block.split("\n")[:-2]
        ]
        found.append(
            {
                (name, line[0]): float(cell)
                for line in lines
                for name, cell in zip(heading[1:], line[1:], strict=True)
            }
        )
    return found


@pytest.mark.slow
def test_the_tables_are_what_the_command_gives(sdsa: Run, tmp_path: Path, fixtures: Path) -> None:
    (command,) = re.findall(r"sdsa study fixtures/.*?\n\n", TEXT, re.DOTALL)
    words = command.replace("\\\n", " ").split()[1:]
    words = [
        str(fixtures / Path(word).name) if word.startswith("fixtures/") else word for word in words
    ]
    words[words.index("report")] = str(tmp_path / "report")
    sdsa(*words, "--no-plots", "--workers", "1", "--device", "cpu").is_clean()
    document: dict[str, Any] = json.loads((tmp_path / "report" / "report.json").read_text())
    for place, table in enumerate(tables()):
        measured = {
            (result["format"], result["transform"]): round(
                result["accuracy"]["top_k"][place]["recall"]["mean"], 4
            )
            for result in document["results"]
            if result["layer"] is None
        }
        assert len(measured) == 6 * 8
        assert table == measured
    seventy_two = document["suggestions"]["by_size"][1]
    assert (seventy_two["format"], seventy_two["transform"]) == ("nvfp4-mixed", "center")
    gain = seventy_two["evidence"]["gain"]
    assert f"+{gain['mean']:.3f} ± {gain['standard_error']:.3f}" in TEXT


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert len(pictures) == 6
    for picture in pictures:
        assert (PAGE.parent / picture).read_bytes().startswith(b"\x89PNG")
