"""What a shell completes: words of lists, and names of tensors in the files that are named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdsa_quant.formats.key_formats import KEY_FORMATS, RULE_FORMATS
from sdsa_quant.study.inputs import FORMAT_NAMES
from support.command_line import program


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line."""
    environment = {
        **os.environ,
        "_SDSA_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
    }
    answer = subprocess.run(
        program(), capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert answer.stderr == ""
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sdsa study k q --formats nvfp4-m", ["nvfp4-mixed"]),
        ("sdsa study k q --formats bf16,f", ["bf16,fp8"]),
        ("sdsa study k q --rotate none,", ["none,hadamard"]),
        ("sdsa bench --format-pair bf16,m", ["bf16,mixed"]),
        ("sdsa bench --backend tr", ["triton"]),
        (
            "sdsa quantize-cache k.safetensors --keys layers.1",
            ["layers.1.keys", "layers.1.lengths"],
        ),
        ("sdsa quantize-cache absent.safetensors --keys l", []),
        ("sdsa study k.safetensors q.safetensors --query-name l", ["layers.1.queries"]),
        ("sdsa score c --queries q.safetensors --query-name ", ["layers.1.queries"]),
    ],
)
def test_lists_and_names_of_tensors_are_completed(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    keys = {"layers.1.keys": torch.ones(9, 128), "layers.1.lengths": torch.tensor([9])}
    save_file(keys | {"x\x1b[31m": torch.ones(1)}, tmp_path / "k.safetensors")
    save_file({"layers.1.queries": torch.ones(1, 128)}, tmp_path / "q.safetensors")
    assert completed(line, tmp_path) == offered


def test_every_format_is_offered() -> None:
    assert sorted(FORMAT_NAMES) == sorted({**KEY_FORMATS, **RULE_FORMATS})
