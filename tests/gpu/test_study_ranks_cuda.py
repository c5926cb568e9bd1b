"""A study on several GPUs: what one process writes, joined by NCCL where each rank has its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.studies import same_page, save_layers

pytestmark = pytest.mark.gpu

OPTIONS = (
    *("--lengths", "*.lengths", "--formats", "nvfp4,fp8", "--rotate", "none,hadamard"),
    *("--gain", "auto", "--device", "cuda", "--no-plots"),
)


def study(layers: Path, output: Path, *, ranks: int, devices: str | None = None) -> dict[str, Any]:
    """The report of a run under ``torchrun``, and its files with the timing taken out."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [sys.executable, *torchrun, "-m", "sdsa_cli", "study", layers, layers, "-o", output]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    answer = subprocess.run(
        [*map(str, command), *OPTIONS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Recall of the unquantized keys") == 1, "one rank reports"
    document: dict[str, Any] = json.loads((output / "report.json").read_text())
    return document


def test_two_gpus_change_nothing(tmp_path: Path, generator: torch.Generator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layers = save_layers(tmp_path / "layers.safetensors", generator)
    one = study(layers, tmp_path / "one", ranks=1, devices="0")
    two = study(layers, tmp_path / "two", ranks=2)
    assert one["timing"]["joined_by"] is None
    assert two["timing"]["joined_by"] == "nccl"
    assert two["device"] == "cuda"
    assert without_run(one) == without_run(two)
    for name in ("report.csv", "report.html"):
        files = [same_page(tmp_path / output / name) for output in ("one", "two")]
        assert files[0] == files[1]


def test_ranks_that_share_a_gpu_are_joined_by_gloo(
    tmp_path: Path, generator: torch.Generator
) -> None:
    layers = save_layers(tmp_path / "layers.safetensors", generator)
    one = study(layers, tmp_path / "one", ranks=1, devices="0")
    two = study(layers, tmp_path / "two", ranks=2, devices="0")
    assert two["timing"]["joined_by"] == "gloo"
    assert without_run(one) == without_run(two)


def without_run(document: dict[str, Any]) -> dict[str, Any]:
    """All that must not depend on how many processes there were, or which GPUs they saw."""
    return {name: document[name] for name in document if name not in ("timing", "environment")}
