"""Put the made parts into the pages, or say where a page differs from what would be made."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Maker = Callable[[], str]

_START = "<!-- made by scripts/docs: {name} -->"
_END = "<!-- end -->"
_PART = re.compile(
    r"^(?P<start><!-- made by scripts/docs: (?P<name>[\w-]+) -->\n)(?P<text>.*?)^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)
_DIFF_LINES = 12


@dataclass(frozen=True)
class Made:
    """What a run of `scripts/docs` would have on disk.

    Parameters
    ----------
    texts : dict
        Text of every file that has made parts or is made whole, by path.
    faults : list of str
        Marks that name nothing, and makers whose part is on no page.
    """

    texts: dict[Path, str]
    faults: list[str]

    def differences(self) -> list[str]:
        """A short diff for each file that is not as it would be made."""
        found = []
        for path, wanted in self.texts.items():
            given = path.read_text(encoding="utf-8") if path.exists() else ""
            if given != wanted:
                lines = difflib.unified_diff(
                    given.splitlines(), wanted.splitlines(), "on disk", "made now", lineterm="", n=0
                )
                found.append("\n    ".join([str(path), *list(lines)[2:][:_DIFF_LINES]]))
        return found

    def write(self) -> list[Path]:
        """Write the files that differ; returns their paths."""
        changed = []
        for path, wanted in self.texts.items():
            if not path.exists() or path.read_text(encoding="utf-8") != wanted:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(wanted, encoding="utf-8")
                changed.append(path)
        return changed


def make(
    root: Path, pages: list[Path], parts: Mapping[str, Maker], files: Mapping[str, Maker]
) -> Made:
    """Make every part and file.

    Parameters
    ----------
    root : Path
        The repository.
    pages : list of Path
        Markdown pages that may hold made parts.
    parts : mapping of str to function
        What makes the part of each name.
    files : mapping of str to function
        What makes the whole of a file, by its path below `root`.
    """
    texts: dict[Path, str] = {}
    faults: list[str] = []
    used: set[str] = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        names = [match["name"] for match in _PART.finditer(text)]
        if text.count("<!-- made by scripts/docs") != len(names):
            faults.append(f"{page}: a made part does not end with {_END}")
        faults += [f"{page}: nothing makes {name!r}" for name in names if name not in parts]
        used |= set(names)
        if set(names) & set(parts):
            texts[page] = _PART.sub(lambda match: _filled(match, parts), text)
    faults += [f"no page has the part {name!r}" for name in parts if name not in used]
    for name, maker in files.items():
        texts[root / name] = maker()
    return Made(texts, faults)


def _filled(match: re.Match[str], parts: Mapping[str, Maker]) -> str:
    maker = parts.get(match["name"])
    if maker is None:
        return match[0]
    return f"{_START.format(name=match['name'])}\n{maker().strip()}\n{_END}"
