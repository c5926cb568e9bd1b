"""Threads and spinning of CPU operations: chosen by quota and load, and left alone where set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdsa_quant import threads
from sdsa_quant.threads import is_busy, prepare_threads, quota_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense\n"}, None),
    ],
    ids=["none", "max", "2.5", "half", "version-1", "unlimited-1", "nonsense"],
)
def test_cores_of_a_quota(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert quota_cores(tmp_path) == cores


def test_the_smallest_quota_above_a_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"a": "400000 100000", "a/b": "max 100000", "a/b/c": "800000 100000"}.items():
        write(tmp_path / name / "cpu.max", text)
    folders = [tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    monkeypatch.setattr(threads, "_groups", lambda root: folders)
    assert quota_cores(tmp_path) == 4


@pytest.mark.parametrize(
    ("running", "busy"), [(1, False), (2, True), (9, True)], ids=["alone", "one-other", "many"]
)
def test_a_machine_is_busy_where_threads_would_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: int, busy: bool
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    write(tmp_path / "stat", f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    assert is_busy(tmp_path / "stat") == busy
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of which this process may use 4
    assert not is_busy(tmp_path / "stat")
    assert not is_busy(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "0"}),
        ({"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "0"}),
        ({"GOMP_SPINCOUNT": "5"}, {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}),
    ],
    ids=["nothing", "threads", "spins", "policy"],
)
def test_what_is_set_stays(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], chosen: dict[str, str]
) -> None:
    monkeypatch.setattr(threads, "quota_cores", lambda: 3)
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    monkeypatch.setattr(threads, "is_busy", lambda: True)
    environment = dict(given)
    prepare_threads(environment)
    assert environment == chosen


def test_the_command_chooses_before_torch_is_loaded() -> None:
    code = """
import os, sys
from sdsa_cli.__main__ import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sdsa_cli.app":
            print("torch" in sys.modules, os.environ["GOMP_SPINCOUNT"] in ("0", "10000"))
sys.meta_path.insert(0, Finder())
sys.argv = ["sdsa", "--version"]
main()
"""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[0] == "False True"
