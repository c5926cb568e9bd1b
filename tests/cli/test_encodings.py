"""What stdout cannot encode never makes a command fail that has succeeded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_cli.text import encodable
from support.command_line import Run

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STREAMS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "c-locale": C_LOCALE,
}


@pytest.mark.parametrize("environment", STREAMS.values(), ids=STREAMS.keys())
def test_a_command_that_succeeded_says_so(
    sdsa_process: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    keys = {"cl\u00e9s \u9375": torch.randn(200, 128), "lengths": torch.tensor([130, 70])}
    save_file(keys, tmp_path / "keys.safetensors")
    made = sdsa_process(
        *("quantize-cache", "keys.safetensors", "-o", "c.safetensors", "--lengths", "lengths"),
        **environment,
    )
    made.is_clean()
    shown = sdsa_process("inspect", "c.safetensors", **environment)
    shown.is_clean()
    assert "130 - 70 (sum 200)" in shown.stdout
    document = sdsa_process("inspect", "keys.safetensors", "--json", **environment)
    document.is_clean()
    assert "cl\u00e9s \u9375" in {each["name"] for each in json.loads(document.stdout)["tensors"]}


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("a \u00b7 b", "utf-8", "a \u00b7 b"),
        ("a \u00b7 b", "ascii", "a - b"),
        ("\u2500\u2500 2 \u00d7 3", "ascii", "-- 2 x 3"),
        ("cl\u00e9s", "ascii", "cl\\xe9s"),
        ("\u9375", "latin-1", "\\u9375"),
        ("x\u00b7", None, "x\u00b7"),
    ],
)
def test_encodable(text: str, encoding: str | None, shown: str) -> None:
    assert encodable(text, encoding) == shown


def test_help_is_shown_in_any_encoding(sdsa_process: Run) -> None:
    for arguments in (["--help"], ["study", "--help"]):
        assert sdsa_process(*arguments, **C_LOCALE).exit_code == 0
