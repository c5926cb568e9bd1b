"""Memory of quantize-cache does not grow with the keys."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from support.caches import save_sparse_keys
from support.command_line import program

KEYS = 1_000_000  # 256 MB of BF16
LIMIT_MB = 300  # 170 MB were measured for these and for 8 GB of keys, most of it torch itself


def own_memory_mb(pid: int) -> float:
    """Resident memory of a process beyond the files that it maps; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return sum(int(kb) for kb in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)) / 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--layout", "separate", "--scale-order", "128x4")], ids=["plain", "tiled"]
)
def test_memory_is_bounded(tmp_path: Path, options: tuple[str, ...]) -> None:
    save_sparse_keys(tmp_path / "keys.safetensors", KEYS)
    arguments = (tmp_path / "keys.safetensors", "-o", tmp_path / "cache.safetensors", *options)
    process = subprocess.Popen(
        program("quantize-cache", *arguments, "--device", "cpu"),
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, own_memory_mb(process.pid))
        time.sleep(0.005)
    assert process.returncode == 0
    assert 50 < peak < LIMIT_MB
