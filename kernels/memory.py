"""How much memory is left, so that what cannot fit is refused before it is tried."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device.

    On a GPU its free memory; on a CPU what the kernel calls available, or what the memory limit of
    this process's control group leaves where that is less.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _read_table(_MEMINFO)["MemAvailable"] * 1024
    left = _control_group_bytes()
    return available if left is None else min(available, left)


def _control_group_bytes() -> int | None:
    """Bytes below the limit of a version 2 control group; None where there is no such limit.

    File pages count as used there, but are given back when memory is wanted.
    """
    try:
        name = _OWN_GROUP.read_text().rpartition("::")[2].strip()
        group = _GROUPS / name.lstrip("/")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        usage = _read_table(group / "memory.stat")
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + usage["active_file"] + usage["inactive_file"])


def _read_table(path: Path) -> dict[str, int]:
    """Lines such as ``MemAvailable: 1234 kB`` or ``active_file 1234`` as names and numbers."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
