"""What a report says about where it was made: versions, devices, source revision.

Nothing here raises: what cannot be found out is None, and a failing part says why in its place.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from . import __version__

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "safetensors", "flashinfer-python")


def describe_environment() -> dict[str, Any]:
    """Versions, CPU, CUDA devices and git revision of this process, ready for JSON."""
    return {
        "sdsa": __version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "cpu_threads": os.cpu_count(),
        "cuda": describe_cuda(),
    }


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None; asked without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_cuda() -> dict[str, Any]:
    """CUDA version that torch was built for and the devices that it sees.

    ``error`` holds the reason where torch or its driver could not be asked.
    """
    answer: dict[str, Any] = {"version": None, "devices": [], "error": None}
    try:
        import torch

        answer["version"] = torch.version.cuda
        if torch.cuda.is_available():
            answer["devices"] = [_device(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken install or driver is what a report has to show
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, with ``-dirty`` where it was edited.

    None for an installed package and where git cannot be asked.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
