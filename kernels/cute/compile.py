"""Compiling one variant of the scoring kernels to a device binary; needs no GPU."""

from __future__ import annotations

import tempfile
from typing import Any

import cutlass
import cutlass.cute as cute

from sdsa_quant.errors import UnsupportedError

from .arguments import Addresses, Record, Sizes, types_of
from .compiled import CompiledKernel, LaunchConfig
from .schedule import LATE_LEAST_PAGES
from .selection import finish, mark
from .selection.arguments import SelectAddresses, SelectSizes
from .selection.order import THREADS as SELECTING_THREADS
from .selection.rows import CTAS_PER_SM
from .variants import MARK_VARIANT, SELECTING_VARIANTS, TENSOR_CORE_VARIANTS, ctas_per_sm
from .warp import kernel as warp_kernel


def compile_variant(architecture: str, variant: str) -> CompiledKernel:
    """Trace and compile the kernel.

    Parameters
    ----------
    architecture : str
        Such as ``"sm_90a"``.
    variant : str
        One of `variants.variants_of` the architecture, or of `variants.SELECTING_VARIANTS`.

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
    records: tuple[type[Record], ...] = (Addresses, Sizes)
    if variant in SELECTING_VARIANTS:
        trace, records = _trace_selecting_kernel, (SelectAddresses, SelectSizes)
    placeholders = [
        record(*(getattr(cutlass, name)(0) for name in types_of(record))) for record in records
    ]
    with tempfile.TemporaryDirectory(prefix="sdsa-cute-") as folder:
        options = f"--gpu-arch {architecture} --keep-cubin --keep-ptx --dump-dir {folder}"
        return trace(architecture, variant, placeholders, options)


def _trace_warp_kernel(
    architecture: str, variant: str, placeholders: list[Any], options: str
) -> tuple[Any, LaunchConfig]:
    ctas = ctas_per_sm(architecture)
    traced = cute.compile(warp_kernel.launch_kernel, *placeholders, variant, ctas, options=options)
    operands = warp_kernel.make_operands(variant)
    return traced, LaunchConfig(
        threads=warp_kernel.THREADS,
        shared_bytes=warp_kernel.shared_bytes(operands),
        ctas_per_sm=ctas,
        teams=warp_kernel.WARPS // operands.team,
        late_least_pages=LATE_LEAST_PAGES,
        two_late_pages=operands.two_late_pages,
    )


def _trace_tensor_core_kernel(
    architecture: str, variant: str, placeholders: list[Any], options: str
) -> tuple[Any, LaunchConfig]:
    # Here, since it uses an experimental part of CuTe DSL, which other kernels must not depend on.
    from .tcgen05.kernel import launch_tcgen05_kernel

    traced = cute.compile(launch_tcgen05_kernel, *placeholders, variant, options=options)
    return traced, tensor_core_config(variant)


def _trace_selecting_kernel(
    architecture: str, variant: str, placeholders: list[Any], options: str
) -> tuple[Any, LaunchConfig]:
    if variant == MARK_VARIANT:
        launch, shared_bytes, ctas = mark.launch_mark, mark.MARK_SHARED_BYTES, CTAS_PER_SM
    else:
        launch, shared_bytes, ctas = finish.launch_finish, finish.shared_bytes_of(architecture), 1
    return cute.compile(launch, *placeholders, options=options), LaunchConfig(
        threads=SELECTING_THREADS,
        shared_bytes=shared_bytes,
        ctas_per_sm=ctas,
        teams=1,
        late_least_pages=0,
        two_late_pages=0,
    )


def tensor_core_config(variant: str) -> LaunchConfig:
    """How to launch a tcgen05 variant."""
    from .tcgen05.kernel import LATE_LEAST_TILE_PAGES
    from .tcgen05.rings import THREADS, shared_map
    from .tcgen05.tiles import FORMATS

    tile = FORMATS[variant]
    return LaunchConfig(
        threads=THREADS,
        shared_bytes=shared_map(tile).total,
        ctas_per_sm=tile.ctas_per_sm,
        teams=1,
        late_least_pages=LATE_LEAST_TILE_PAGES,
        two_late_pages=0,
        box_bytes=tile.row_bytes,
        columns=tile.columns,
    )
