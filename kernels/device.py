"""What is here: what can be imported, what a device can do, what it has free, and captures on it.

Asked lazily and without heavy imports.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import torch

from sdsa_quant.environment import installed_version
from sdsa_quant.errors import UnsupportedError

_LOAD_BYTES = 128  # of a core or multiprocessor in one clock
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


# None where a distribution is absent; asked of the file system once.
package_version = functools.cache(installed_version)


@functools.cache
def can_find(module: str) -> bool:
    """Whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def device_index(device: torch.device) -> int:
    """Index of a CUDA device; a device without one is the current device."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device, such as (9, 0) for SM90."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def load_bytes_per_second(device: torch.device) -> float:
    """Bytes a second that a device cannot exceed, wherever they lie: what its load units take.

    On a GPU 128 bytes a clock for each multiprocessor, at 3 GHz, faster than any runs; on a CPU 128
    for each core, at 8 GHz.
    """
    if device.type == "cuda":
        return multiprocessors(device_index(device)) * _LOAD_BYTES * 3e9
    return (os.cpu_count() or 1) * _LOAD_BYTES * 8e9


def refuse_capture_before_warmup(index: int, function: str) -> None:
    """Raise where the current stream is being captured: compiling would invalidate the capture.

    Raises
    ------
    RuntimeError
        The current stream of the device is being captured.
    """
    with torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise UnsupportedError(
            f"a first call compiles a kernel, which a stream capture forbids: "
            f"run {function} once before capture"
        )


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
