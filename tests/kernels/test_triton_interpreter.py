"""Run the tests of `interpreted/` where they can run: in processes with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("numpy", reason="Triton's interpreter computes with NumPy")

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(file: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", str(FOLDER / file)]
    # A worker of pytest-xdist would hand its role on to the new process.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout, result.stdout
