"""What this process can import and what a device can do, asked lazily and without heavy imports."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch


@functools.cache
def package_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None where it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
