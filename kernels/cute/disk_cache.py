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
from dataclasses import asdict, dataclass
from pathlib import Path

from sdsa_kernels.device import package_version
from sdsa_quant.layout import PAGE

CACHE_VARIABLE = "SDSA_CACHE_DIR"
_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What the host must know of a kernel to launch it."""

    threads: int  # of a CTA
    shared_bytes: int  # dynamic, of a CTA
    ctas_per_sm: int  # that run at a time
    teams: int  # of a CTA, each with a share of its own
    late_least_pages: int  # for every team, from which on late CTAs pay
    two_late_pages: int  # for every team, from which on two waves of them pay; 0: never

    def grid(self, sms: int, groups: int, max_context: int) -> tuple[int, int]:
        """CTAs of the first wave, and of all, on a device of `sms` multiprocessors.

        They depend on the capacity of a call, never on its lengths: the first wave fills the GPU,
        or has a page for every CTA; where lengths could give every team many, late CTAs follow.
        """
        capacity = groups * -(-max_context // PAGE)
        first = min(sms * self.ctas_per_sm, capacity)
        team_pages = capacity // (first * self.teams)
        waves = 1
        if team_pages >= self.late_least_pages:
            waves += 2 if 0 < self.two_late_pages <= team_pages else 1
        return first, first * waves


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A device binary and how to launch it."""

    image: bytes
    symbol: str
    config: LaunchConfig


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
    """A kernel from its cache file, None where there is no usable one."""
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


def compile_kernel(architecture: str, variant: str) -> CompiledKernel:
    """Compile a kernel; needs no GPU."""
    from .compile import compile_variant

    return compile_variant(architecture, variant)


def compiled_kernel(architecture: str, variant: str) -> CompiledKernel:
    """A kernel from the cache, or compiled now and cached."""
    path = entry_path(architecture, variant)
    kernel = read_entry(path)
    if kernel is None:
        kernel = compile_kernel(architecture, variant)
        write_entry(path, kernel)
    return kernel
