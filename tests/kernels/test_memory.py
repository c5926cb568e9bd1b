"""Available memory, from the system's and the control group's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdsa_kernels import device

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine with 8,192,000 bytes available and no control group limit."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "cgroup").write_text("1:cpu:/\n0::/job/7\n")
    monkeypatch.setattr(device, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(device, "_GROUPS", tmp_path / "groups")
    return tmp_path


def set_limit(system: Path, limit: str) -> None:
    group = system / "groups" / "job" / "7"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.stat").write_text("anon 1\nactive_file 200000\ninactive_file 300000\n")


def test_without_a_control_group(system: Path) -> None:
    assert device.available_bytes(CPU) == 8000 * 1024


def test_a_limit_counts_file_pages_as_free(system: Path) -> None:
    set_limit(system, "5000000")
    assert device.available_bytes(CPU) == 5_000_000 - 3_000_000 + 500_000


@pytest.mark.parametrize("limit", ["max", "99000000000"])
def test_a_limit_that_is_none_or_larger(system: Path, limit: str) -> None:
    set_limit(system, limit)
    assert device.available_bytes(CPU) == 8000 * 1024


def test_this_machine_has_memory() -> None:
    assert device.available_bytes(CPU) > 1 << 20
