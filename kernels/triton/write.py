"""Host side of `quantize_write_nvfp4` on CUDA tensors: one launch of `quantize`.

One variant per dtype of the values and device; nothing else is compiled in or specialized on.
"""

from __future__ import annotations

import torch

from sdsa_kernels.device import device_index, refuse_capture_before_warmup
from sdsa_kernels.problem import WriteProblem
from sdsa_kernels.switches import interpreting

from .launch import COMPILE_OPTIONS, overlaps_launches
from .quantize import quantize_write_kernel

# H200, 2026-11, 1M BF16 keys: 91 us, as with any 8 to 64 rows and 1 to 8 warps; 159 with rows, four
# threads each, that do not fill a warp.
_ROWS_PER_PROGRAM = 16
_WARPS = 2
_VECTOR_BYTES = 16

_warm: set[tuple[int, torch.dtype]] = set()


def launch(keys: WriteProblem, queries: WriteProblem | None) -> None:
    """Quantize and write validated rows on the current stream of their device.

    Raises
    ------
    RuntimeError
        The kernel is not compiled yet and the stream is being captured.
    """
    if not _programs(keys, queries):
        return  # and has not compiled anything
    index = device_index(keys.values.device)
    variant = (index, keys.values.dtype)
    if variant not in _warm:
        refuse_capture_before_warmup(index, "quantize_write_nvfp4")
    with torch.cuda.device(index):
        run_kernel(keys, queries)
    _warm.add(variant)


def run_kernel(keys: WriteProblem, queries: WriteProblem | None) -> None:
    """The launch itself, on the current device; under the interpreter the tensors are the CPU's."""
    # Without query rows the key's arguments stand in for theirs, and none of them is read.
    query = keys if queries is None else queries
    overlaps = not interpreting() and overlaps_launches(device_index(keys.values.device))
    options = {"launch_pdl": True} if overlaps else {}
    quantize_write_kernel[(_programs(keys, queries),)](
        keys.values,
        keys.index,
        _blocks(keys.codes),
        keys.scales,
        query.values,
        query.index,
        _blocks(query.codes),
        query.scales,
        keys.values.shape[0],
        0 if queries is None else queries.values.shape[0],
        _vectors(keys.values),
        _vectors(query.values),
        _vectors(keys.codes),
        _vectors(query.codes),
        keys.scales.stride(0),
        query.scales.stride(0),
        ROWS=_ROWS_PER_PROGRAM,
        OVERLAPS=overlaps,
        num_warps=_WARPS,
        **options,
        **COMPILE_OPTIONS,
    )


def _programs(keys: WriteProblem, queries: WriteProblem | None) -> int:
    return sum(
        -(-rows.values.shape[0] // _ROWS_PER_PROGRAM)
        for rows in (keys, queries)
        if rows is not None
    )


def _blocks(codes: torch.Tensor) -> torch.Tensor:
    """The same bytes, a block's codes in each int64.

    A single page or row may have any stride, which a view as int64 does not take.
    """
    return codes.view(torch.int64) if codes.shape[0] > 1 else codes.flatten().view(torch.int64)


def _vectors(tensor: torch.Tensor) -> int:
    """Stride of the first dimension in vectors of 16 bytes."""
    return tensor.stride(0) * tensor.element_size() // _VECTOR_BYTES
