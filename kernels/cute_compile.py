"""Compiling one variant of the scoring kernel to a device binary; needs no GPU."""

from __future__ import annotations

import tempfile

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from sdsa_quant.errors import UnsupportedError

from .cute_compile_cache import CompiledKernel, LaunchConfig
from .cute_kernel import (
    THREADS,
    WARPS,
    launch_kernel,
    make_operands,
    shared_bytes,
)
from .cute_schedule import LATE_LEAST_PAGES
from .cute_variants import ctas_per_sm


def compile_variant(architecture: str, variant: str) -> CompiledKernel:
    """Trace and compile the kernel.

    Parameters
    ----------
    architecture : str
        Such as ``"sm_90a"``.
    variant : str
        One of `cute_variants.variants_of` the architecture.

    Raises
    ------
    UnsupportedError
        CuTe DSL gave no binary.
    """
    ctas = ctas_per_sm(architecture)
    placeholders = [Int64(0)] * 14 + [Int32(0)] * 5 + [Uint32(0)]
    with tempfile.TemporaryDirectory(prefix="sdsa-cute-") as folder:
        options = f"--gpu-arch {architecture} --keep-cubin --dump-dir {folder}"
        compiled = cute.compile(launch_kernel, *placeholders, variant, ctas, options=options)
    image, symbols = compiled.__cubin__, list(compiled.kernel_info)
    if not image or len(symbols) != 1:
        raise UnsupportedError(f"CuTe DSL gave no binary for {variant} on {architecture}")
    operands = make_operands(variant)
    config = LaunchConfig(
        threads=THREADS,
        shared_bytes=shared_bytes(operands),
        ctas_per_sm=ctas,
        teams=WARPS // operands.team,
        late_least_pages=LATE_LEAST_PAGES,
        two_late_pages=operands.two_late_pages,
    )
    return CompiledKernel(image, symbols[0], config)
