"""Compiled CuTe DSL kernels: from the disk cache, or compiled here and put there.

A cache entry is one file, named after a hash of everything that the binary depends on: the
architecture, the variant, the version of CuTe DSL and the source of the kernel. Its
first line is JSON (the symbol, the launch configuration, a checksum of the rest), the rest is the
device binary. It is written under a temporary name and renamed, so that processes may share the
folder; an entry that is damaged or cannot be read counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

from sdsa_kernels.device import package_version

from .compiled import CompiledKernel, LaunchConfig

CACHE_VARIABLE = "SDSA_CACHE_DIR"
_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")


def cache_folder() -> Path:
    """``$SDSA_CACHE_DIR``, else ``sdsa`` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sdsa"


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def entry_path(architecture: str, variant: str) -> Path:
    """The cache file of a kernel, whether or not it exists."""
    parts = [architecture, variant, _source_hash()]
    parts += [f"{name}=={package_version(name)}" for name in _DISTRIBUTIONS]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / f"cute-{architecture}-{variant}-{key}.bin"


def _encode(kernel: CompiledKernel) -> bytes:
    header = {
        "symbol": kernel.symbol,
        "config": asdict(kernel.config),
        "sha256": hashlib.sha256(kernel.image).hexdigest(),
    }
    return json.dumps(header).encode() + b"\n" + kernel.image


def _decode(entry: bytes) -> CompiledKernel | None:
    """The kernel of an entry, None where the entry is damaged."""
    first, _, image = entry.partition(b"\n")
    try:
        header = json.loads(first)
        if header["sha256"] != hashlib.sha256(image).hexdigest():
            return None
        return CompiledKernel(image, str(header["symbol"]), LaunchConfig(**header["config"]))
    except (ValueError, KeyError, TypeError):
        return None


def read_entry(path: Path) -> CompiledKernel | None:
    """A kernel from its cache file, None where it cannot be used."""
    try:
        return _decode(path.read_bytes())
    except OSError:
        return None


def write_entry(path: Path, kernel: CompiledKernel) -> None:
    """Put a kernel into its cache file; a folder that cannot be written only costs a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encode(kernel))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({error.strerror}): every process "
            f"compiles its own; set {CACHE_VARIABLE} to a folder that can be written",
            stacklevel=2,
        )


def compiled_kernel(architecture: str, variant: str) -> CompiledKernel:
    """A kernel from the cache, or compiled now and cached."""
    path = entry_path(architecture, variant)
    kernel = read_entry(path)
    if kernel is None:
        from .compile import compile_variant  # needs CuTe DSL, which a cache hit does without

        kernel = compile_variant(architecture, variant)
        write_entry(path, kernel)
    return kernel
