"""Runs of `sdsa` in tests, and what is asserted of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Outcome:
    """What a run of `sdsa` did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """stdout as one strict JSON document."""
        return parse_document(self.stdout)

    def fails_with(self, exit_code: int, *words: str) -> None:
        """Assert an exit code and one error line with all `words`, on stderr and nothing else."""
        assert self.exit_code == exit_code, self.stderr
        assert self.stderr.startswith("error: ")
        assert self.stderr.count("\n") == 1, "an error is one line"
        assert "Traceback" not in self.stderr
        for word in words:
            assert word in self.stderr

    def is_clean(self) -> None:
        """Assert success with nothing on stderr."""
        assert self.exit_code == 0, self.stderr
        assert self.stderr == ""


def parse_document(text: str) -> Any:
    """A JSON document, by a strict parser: NaN and infinities are not JSON."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_document(path: Path) -> Any:
    """A JSON document in a file, by a strict parser."""
    return parse_document(path.read_text())


def program(*arguments: str | Path) -> list[str]:
    """Command line of the real program."""
    return [sys.executable, "-m", "sdsa_cli", *map(str, arguments)]


Run = Callable[..., Outcome]
