"""Run the `sdsa` command inside the test's process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from sdsa_cli.app import app


@dataclass(frozen=True)
class Finished:
    """What one command printed, and how it ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as one strict JSON document."""
        return strict_json(self.stdout)


def run_sdsa(*arguments: object) -> Finished:
    """Run ``sdsa`` with these arguments, 80 columns wide."""
    finished = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"}
    )
    return Finished(finished.exit_code, finished.stdout, finished.stderr)


def run_ok(*arguments: object) -> Finished:
    """Run a command that has to succeed without a word on stderr."""
    finished = run_sdsa(*arguments)
    assert finished.exit_code == 0, finished.stderr
    assert finished.stderr == ""
    return finished


def strict_json(text: str) -> dict[str, Any]:
    """Parse JSON that has no NaN and no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no strict JSON")

    return json.loads(text, parse_constant=refuse)
