"""Runs of quantize-cache that end in the middle leave the old cache or none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdsa_quant import open_cache, validate_cache
from support.caches import save_sparse_keys
from support.command_line import Run, program

SaveKeys = Callable[..., Path]

KEYS = 400_000  # about 0.4 s of work, so that most kills fall into it


@contextmanager
def running(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        program(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_partial_file(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not list(folder.glob(".*.partial")):
        time.sleep(0.001)


@pytest.fixture(scope="module")
def random_delays() -> random.Random:
    return random.Random(20261130)


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["no-old-cache", "old-cache"])
def test_a_kill_at_any_time_leaves_the_old_cache_or_none(
    save_keys: SaveKeys, sdsa: Run, tmp_path: Path, random_delays: random.Random, old: bool
) -> None:
    keys, folder = save_keys(count=KEYS), tmp_path / "out"
    folder.mkdir()
    cache = folder / "cache.safetensors"
    sdsa("quantize-cache", keys, "-o", tmp_path / "expected").is_clean()
    whole = (tmp_path / "expected").read_bytes()
    allowed = [b"old cache"] if old else [None]
    killed_in_the_middle = 0
    for _ in range(6):
        cache.unlink(missing_ok=True)
        if old:
            cache.write_bytes(b"old cache")
        with running("quantize-cache", keys, "-o", cache, "--force") as process:
            wait_for_partial_file(folder, process)
            time.sleep(random_delays.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
            finished = process.wait() == 0
        found = cache.read_bytes() if cache.exists() else None
        # A kill after the rename finds the new cache, and all of it.
        assert found == whole or (not finished and found in allowed)
        killed_in_the_middle += found != whole
    assert killed_in_the_middle, "no kill fell into the work"
    sdsa("quantize-cache", keys, "-o", cache, "--force").is_clean()
    assert cache.read_bytes() == whole
    # What the killed runs left is gone too.
    assert [entry.name for entry in folder.iterdir()] == ["cache.safetensors"]
    validate_cache(open_cache(cache))


@pytest.mark.parametrize(
    ("number", "exit_code", "line"),
    [(signal.SIGINT, 130, "error: interrupted\n"), (signal.SIGTERM, 143, "")],
    ids=["interrupt", "terminate"],
)
def test_a_polite_end_leaves_nothing(
    tmp_path: Path, number: int, exit_code: int, line: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    # Some 10 s of work: it cannot end before the signal, however slow the test is.
    keys = save_sparse_keys(tmp_path / "keys.safetensors", 25 * KEYS)
    with running("quantize-cache", keys, "-o", folder / "c.safetensors") as process:
        wait_for_partial_file(folder, process)
        time.sleep(0.05)  # past the file's creation
        process.send_signal(number)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout, stderr) == (exit_code, "", line)
    assert list(folder.iterdir()) == []
