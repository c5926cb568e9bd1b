"""What a report says about where it was made: versions, devices, source revision.

Nothing here raises: what cannot be found out is None, and a failing part says why in its own field.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import __version__

_CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "safetensors", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device that torch sees."""

    name: str
    """What the driver calls it."""

    capability: str
    """Compute capability, such as ``"9.0"``."""

    memory_bytes: int
    """Its memory, in bytes."""

    multiprocessors: int
    """Number of streaming multiprocessors."""


@dataclass(frozen=True, slots=True)
class CudaEnvironment:
    """What torch knows of CUDA."""

    version: str | None
    """CUDA version that torch was built for; null for a CPU build."""

    devices: tuple[CudaDevice, ...]
    """The devices that torch sees."""

    error: str | None
    """Why torch or its driver could not be asked; null if nothing was wrong."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a report was made."""

    sdsa: str
    """Version of this project."""

    git_revision: str | None
    """Commit of the checkout, with ``-dirty`` if it was edited; null for an installed package."""

    python: str
    """Version of Python."""

    platform: str
    """Operating system and processor."""

    packages: dict[str, str | None]
    """Version of each package that matters; null if it is not installed."""

    cpu: str | None
    """What the CPU calls itself; null where the system does not say."""

    cpu_threads: int | None
    """Logical processors of the machine."""

    cuda: CudaEnvironment
    """CUDA and its devices."""

    date: str
    """When the report was made, such as ``2026-11-30T18:20:05+00:00``."""

    command_line: str
    """Words of the process that made it, as a shell would take them."""


def describe_environment() -> Environment:
    """Versions, CPU, CUDA devices and git revision of this process."""
    return Environment(
        sdsa=__version__,
        git_revision=git_revision(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: installed_version(name) for name in PACKAGES},
        cpu=cpu_name(),
        cpu_threads=os.cpu_count(),
        cuda=describe_cuda(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command_line=command_line(),
    )


def cpu_name() -> str | None:
    """What the CPU calls itself, as Linux has it; elsewhere what Python knows, or None."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or None


def command_line() -> str:
    """The words that this process was started with, ``sdsa`` in place of a path to it."""
    program, *words = sys.argv or [""]
    name = Path(program).name
    return shlex.join(["sdsa" if name in ("sdsa", "__main__.py") else name, *words])


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None; asked without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_cuda() -> CudaEnvironment:
    """CUDA version that torch was built for and the devices that it sees."""
    version: str | None = None
    try:
        import torch

        version = torch.version.cuda
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return CudaEnvironment(version, tuple(_device(index) for index in range(count)), None)
    except Exception as error:  # a broken install or driver is what a report has to show
        return CudaEnvironment(version, (), f"{type(error).__name__}: {error}")


def _device(index: int) -> CudaDevice:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return CudaDevice(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
    )


def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, with ``-dirty`` if it was edited.

    None for an installed package and if git cannot be asked.
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
