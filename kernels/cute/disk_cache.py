"""Compiled CuTe DSL kernels: from the disk cache, or compiled here and put there.

A cache entry is one file, named after a hash of everything that the binary depends on: the
architecture, the variant, the version of CuTe DSL and the source of the kernel. Its
first line is JSON (the symbol, the launch configuration, a checksum of all else), the rest is the
device binary. It is written under a temporary name and renamed, so that processes may share the
folder; an entry that is damaged, cannot be read or belongs to another user counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from sdsa_kernels.device import package_version

from .compiled import CompiledKernel, LaunchConfig

CACHE_VARIABLE = "SDSA_CACHE_DIR"
_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")


def cache_folder() -> Path | None:
    """``$SDSA_CACHE_DIR``, else ``sdsa`` in the user's cache folder; None without a home folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sdsa"
    except RuntimeError:
        return None


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def entry_path(architecture: str, variant: str) -> Path | None:
    """The cache file of a kernel, whether or not it exists; None where there is no folder."""
    folder = cache_folder()
    if folder is None:
        return None
    parts = [architecture, variant, _source_hash()]
    parts += [f"{name}=={package_version(name)}" for name in _DISTRIBUTIONS]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return folder / f"cute-{architecture}-{variant}-{key}.bin"


def _checksum(header: Mapping[str, object], image: bytes) -> str:
    """Of an entry's header, without the checksum itself, and its image."""
    fields = {name: value for name, value in header.items() if name != "sha256"}
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\n" + image).hexdigest()


def _encode(kernel: CompiledKernel) -> bytes:
    header: dict[str, object] = {"symbol": kernel.symbol, "config": asdict(kernel.config)}
    header["sha256"] = _checksum(header, kernel.image)
    return json.dumps(header).encode() + b"\n" + kernel.image


def _decode(entry: bytes) -> CompiledKernel | None:
    """The kernel of an entry, None where the entry is damaged."""
    first, _, image = entry.partition(b"\n")
    try:
        header = json.loads(first)
        if header["sha256"] != _checksum(header, image):
            return None
        return CompiledKernel(image, str(header["symbol"]), LaunchConfig(**header["config"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_entry(path: Path) -> CompiledKernel | None:
    """A kernel from its cache file, None where it cannot be used."""
    try:
        # In a folder that many can write, others must not choose what this process executes.
        if path.stat().st_uid not in (os.geteuid(), 0):
            return None
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


@functools.cache
def _warn_of_no_folder() -> None:
    """Say, once, that there is no home folder to keep compiled kernels in."""
    warnings.warn(
        f"compiled kernels cannot be kept, as there is no home folder: every process compiles its "
        f"own; set {CACHE_VARIABLE} to a folder that can be written",
        stacklevel=3,
    )


def compiled_kernel(architecture: str, variant: str) -> CompiledKernel:
    """A kernel from the cache, or compiled now and cached."""
    path = entry_path(architecture, variant)
    kernel = None if path is None else read_entry(path)
    if kernel is None:
        from .compile import compile_variant  # needs CuTe DSL, which a cache hit does without

        kernel = compile_variant(architecture, variant)
        if path is None:
            _warn_of_no_folder()
        else:
            write_entry(path, kernel)
    return kernel
