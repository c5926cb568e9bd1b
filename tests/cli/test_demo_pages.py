"""README.md and docs/tutorial.md show what the demo's commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.command_line import Run

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/tutorial.md")
# Times differ from run to run; the others are commands, their continuation lines, and settings.
NOT_PRINTED = ("time ", "replay:", "$ ", "sdsa ", "scripts/", "--", "-o ", "───────────")


def commands(script: Path) -> list[list[str]]:
    """The `sdsa` commands of scripts/demo, as words."""
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    names = dict(re.findall(r"^(\w+)=(\S+)$", text, re.MULTILINE))
    found = []
    for line in re.findall(r"^run sdsa (.*)$", text, re.MULTILINE):
        for name, value in names.items():
            line = line.replace(f'"${name}"', value)
        found.append(shlex.split(line))
    return found


def shown_lines(page: Path) -> list[str]:
    """The lines of output that a page shows, in fences without a language and indented."""
    text = page.read_text(encoding="utf-8")
    fences = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences.findall(text) if not language]
    blocks += re.findall(r"(?:^    .*\n)+", fences.sub("", text), re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(NOT_PRINTED)]


@pytest.fixture
def printed(sdsa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every line that the demo and a look at its input print."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    runs = commands(ROOT / "scripts" / "demo")
    assert [words[0] for words in runs] == ["quantize-cache", "score"]
    runs.append(["inspect", "fixtures/smollm2-layer12.safetensors"])
    lines: set[str] = set()
    for words in runs:
        answer = sdsa(*words)
        assert answer.exit_code == 0, answer.stderr
        lines |= {line.strip() for line in (answer.stdout + answer.stderr).splitlines()}
    return lines


def test_the_pages_show_what_is_printed(printed: set[str]) -> None:
    for page in PAGES:
        shown = shown_lines(ROOT / page)
        assert any("0.8906" in line for line in shown), page
        assert [line for line in shown if line not in printed] == [], page
