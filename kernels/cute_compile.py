"""Compiling one variant of the scoring kernels to a device binary; needs no GPU."""

from __future__ import annotations

import tempfile
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from sdsa_quant.errors import UnsupportedError
from sdsa_quant.layout import PAGE

from . import cute_kernel
from .cute_compile_cache import CompiledKernel, LaunchConfig
from .cute_schedule import LATE_WAVE_MINIMUM_UNITS
from .cute_variants import TENSOR_CORE_VARIANTS, ctas_per_sm


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
    traced, config = trace_variant(architecture, variant)
    image, symbols = traced.__cubin__, list(traced.kernel_info)
    if not image or len(symbols) != 1:
        raise UnsupportedError(f"CuTe DSL gave no binary for {variant} on {architecture}")
    return CompiledKernel(image, symbols[0], config)


def trace_variant(architecture: str, variant: str) -> tuple[Any, LaunchConfig]:
    """What CuTe DSL makes of a variant (its PTX is ``__ptx__``), and how to launch it."""
    trace = _trace_tensor_core_kernel if variant in TENSOR_CORE_VARIANTS else _trace_warp_kernel
    with tempfile.TemporaryDirectory(prefix="sdsa-cute-") as folder:
        options = f"--gpu-arch {architecture} --keep-cubin --keep-ptx --dump-dir {folder}"
        return trace(architecture, variant, options)


def _trace_warp_kernel(architecture: str, variant: str, options: str) -> tuple[Any, LaunchConfig]:
    ctas = ctas_per_sm(architecture)
    traced = cute.compile(
        cute_kernel.launch_kernel, *_placeholders(14, 6), variant, ctas, options=options
    )
    operands = cute_kernel.make_operands(variant)
    return traced, LaunchConfig(
        threads=cute_kernel.THREADS,
        shared_bytes=cute_kernel.shared_bytes(operands),
        ctas_per_sm=ctas,
        unit_keys=1 << operands.unit_shift,
        late_wave_units=cute_kernel.WARPS * LATE_WAVE_MINIMUM_UNITS,
        parameters="14q6i",
    )


def _trace_tensor_core_kernel(
    architecture: str, variant: str, options: str
) -> tuple[Any, LaunchConfig]:
    # Here, since it uses an experimental part of CuTe DSL, which other kernels must not depend on.
    from . import cute_tcgen05_kernel
    from .cute_tcgen05_rings import THREADS, shared_map
    from .cute_tcgen05_tiles import FORMATS

    traced = cute.compile(
        cute_tcgen05_kernel.launch_tcgen05_kernel,
        *_placeholders(10, 5),
        variant,
        options=options,
    )
    tile = FORMATS[variant]
    return traced, LaunchConfig(
        threads=THREADS,
        shared_bytes=shared_map(tile).total,
        ctas_per_sm=tile.ctas_per_sm,
        unit_keys=PAGE,
        late_wave_units=cute_tcgen05_kernel.LATE_WAVE_PAGES,
        parameters="128s128s10q5i",
    )


def _placeholders(addresses: int, integers: int) -> list[Int64 | Int32]:
    return [Int64(0)] * addresses + [Int32(0)] * integers
