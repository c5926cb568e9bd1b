"""Running `sdsa` in tests: in this process, or as the real program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sdsa_cli.app import app
from support.command_line import Outcome, Run, program
from support.score_files import Files


@pytest.fixture
def sdsa(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``sdsa(*arguments)`` in this process, 120 columns wide."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str | Path) -> Outcome:
        answer = CliRunner().invoke(app, [str(word) for word in arguments], prog_name="sdsa")
        return Outcome(answer.exit_code, answer.stdout, answer.stderr)

    return run


@pytest.fixture
def sdsa_process(tmp_path: Path) -> Run:
    """``sdsa_process(*arguments)`` as a process of its own, in `tmp_path`."""

    def run(*arguments: str | Path, **environment: str) -> Outcome:
        answer = subprocess.run(
            program(*arguments),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            timeout=120,
            check=False,
        )
        return Outcome(answer.returncode, answer.stdout, answer.stderr)

    return run


@pytest.fixture
def real(fixtures: Path) -> Path:
    """Real keys and queries of one attention layer."""
    return fixtures / "smollm2-layer12.safetensors"


@pytest.fixture
def save_keys(tmp_path: Path, generator: torch.Generator) -> Callable[..., Path]:
    """``save_keys(name, count, dtype, lengths)``: a file of random keys in `tmp_path`."""

    def save(
        name: str = "keys.safetensors",
        count: int = 1000,
        dtype: torch.dtype = torch.bfloat16,
        lengths: Sequence[int] | None = None,
    ) -> Path:
        tensors = {"keys": torch.randn((count, 128), generator=generator).to(dtype)}
        if lengths is not None:
            tensors["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def files(sdsa: Run, tmp_path: Path, generator: torch.Generator) -> Files:
    """Small files to score."""
    return Files(sdsa, tmp_path, generator)
