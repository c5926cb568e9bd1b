"""`sdsa study --score`: heads named on the command line, or refused with the flag to give."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from support.command_line import Run, read_document
from support.studies import FAST


def test_blocks(sdsa: Run, tmp_path: Path, generator: torch.Generator) -> None:
    path, output = tmp_path / "capture.safetensors", tmp_path / "report"
    tensors = {
        "keys": torch.randn(900, 128, generator=generator).bfloat16(),
        "queries": torch.randn(4, 8, 128, generator=generator).bfloat16(),
    }
    save_file(tensors, path)
    options = ("--causal", "--formats", "nvfp4", "--no-plots", *FAST, "--score", "block-max")
    arguments = ("study", str(path), str(path), "-o", str(output), *options)
    refused = sdsa(*arguments)
    assert refused.exit_code == 2
    assert "--select must name blocks for the score block-max" in refused.stderr
    select = ("--select", "blocks:32:8", "--local-blocks", "1")
    refused = sdsa(*arguments, *select, "--fail-below", "recall@4.p1=0.5")
    assert "k must be one of --top-k 8, got 4" in refused.stderr
    done = sdsa(*arguments, *select, "--fail-below", "recall@8.p1=0.1")
    assert done.exit_code == 0, done.stderr
    assert "score block-max, blocks of 32 keys, 1 local block always" in done.stdout
    worst = read_document(output / "report.json")["results"][0]["accuracy"]["top_k"][0]["recall"]
    row, head = divmod(worst["worst"]["row"], 8)
    assert f"request 0, row {row}, head {head}, 29 blocks" in done.stdout


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
