"""`sdsa study --score`: heads named on the command line, or refused with the flag to give."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from support.command_line import Run, read_document
from support.studies import FAST


def test_heads(sdsa: Run, tmp_path: Path, generator: torch.Generator) -> None:
    path, output = tmp_path / "capture.safetensors", tmp_path / "report"
    tensors = {
        "keys": torch.randn(200, 128, generator=generator).bfloat16(),
        "queries": torch.randn(4, 16, 128, generator=generator).bfloat16(),
        "weights": torch.randn(4, 16, generator=generator),
    }
    save_file(tensors, path)
    options = ("--causal", "--formats", "nvfp4", "--top-k", "16", "--no-plots", *FAST)
    arguments = ("study", str(path), str(path), "-o", str(output), *options)
    refused = sdsa(*arguments)
    assert refused.exit_code == 2
    assert "give --score relu-sum for rows with heads" in refused.stderr
    done = sdsa(*arguments, "--score", "relu-sum", "--weights", "weights")
    assert done.exit_code == 0, done.stderr
    document = read_document(output / "report.json")
    assert (document["inputs"]["score"], document["inputs"]["weights"]) == ("relu-sum", "weights")
    assert document["layers"][0]["rows"] == 4
