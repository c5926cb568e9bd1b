"""Host side of `quantize_write_nvfp4` on CUDA tensors: one launch of the kernel of its rule.

One variant per rule, dtype of the values and device; nothing else is compiled in or specialized on.
"""

from __future__ import annotations

import torch

from sdsa_kernels.device import device_index, refuse_capture_before_warmup
from sdsa_kernels.problem import WriteProblem
from sdsa_kernels.switches import interpreting
from sdsa_quant.calibration.layer import LayerWeights
from sdsa_quant.formats.nvfp4 import AMAX_OVER_6, SEARCH
from sdsa_quant.formats.rule_weights import RuleWeights

from .block_rules import write_block_rule_kernel
from .covariance import write_covariance_kernel
from .launch import COMPILE_OPTIONS, overlaps_launches
from .quantize import quantize_write_kernel

# H200, 2026-11, 1M BF16 keys: 91 us, as with any 8 to 64 rows and 1 to 8 warps; 159 with rows, four
# threads each, that do not fill a warp.
_ROWS_PER_PROGRAM = 16
_WARPS = 2
_VECTOR_BYTES = 16

_KEYS_PER_PROGRAM = 16  # of the rule covariance: what tensor cores take
_BLOCK_RULE_ROWS = 8  # of the rules that choose a scale: 8 threads a row
_BLOCK_RULE_WARPS = 2
_INTERPRETED_KEYS = 1024  # of a program, which costs the same for any number
_COVARIANCE_WARPS = 4  # 8 threads a key

_warm: set[tuple[int, torch.dtype, str]] = set()


def launch(
    keys: WriteProblem,
    queries: WriteProblem | None,
    rule: str = AMAX_OVER_6,
    calibration: LayerWeights | None = None,
) -> None:
    """Quantize and write validated rows on the current stream of their device.

    Raises
    ------
    RuntimeError
        The kernel is not compiled yet and the stream is being captured.
    """
    if keys.values.shape[0] + (0 if queries is None else queries.values.shape[0]) == 0:
        return  # and has not compiled anything
    index = device_index(keys.values.device)
    variant = (index, keys.values.dtype, rule)
    if variant not in _warm:
        refuse_capture_before_warmup(index, "quantize_write_nvfp4")
    with torch.cuda.device(index):
        run_kernel(keys, queries, rule, calibration)
    _warm.add(variant)


def run_kernel(
    keys: WriteProblem,
    queries: WriteProblem | None,
    rule: str = AMAX_OVER_6,
    calibration: LayerWeights | None = None,
) -> None:
    """The launch itself, on the current device; under the interpreter the tensors are the CPU's."""
    overlaps = not interpreting() and overlaps_launches(device_index(keys.values.device))
    options = {"launch_pdl": True} if overlaps else {}
    options |= COMPILE_OPTIONS
    # Without query rows the key's arguments stand in for theirs, and none of them is read.
    query = keys if queries is None else queries
    counts = keys.values.shape[0], 0 if queries is None else queries.values.shape[0]
    strides = (
        _vectors(keys.values),
        _vectors(query.values),
        _vectors(keys.codes),
        _vectors(query.codes),
        keys.scales.stride(0),
        query.scales.stride(0),
    )
    if calibration is not None:
        per_program = _INTERPRETED_KEYS if interpreting() else _KEYS_PER_PROGRAM
        write_covariance_kernel[(_programs(counts, per_program),)](
            *_tensors(keys),
            *_weights(calibration.keys),
            *_tensors(query),
            *_weights(calibration.queries),
            calibration.keys.step,
            calibration.queries.step,
            *counts,
            *strides,
            KEYS=per_program,
            OVERLAPS=overlaps,
            num_warps=_COVARIANCE_WARPS,
            **options,
        )
        return
    if rule != AMAX_OVER_6:
        per_program = _INTERPRETED_KEYS if interpreting() else _BLOCK_RULE_ROWS
        write_block_rule_kernel[(_programs(counts, per_program),)](
            *_tensors(keys),
            *_tensors(query),
            *counts,
            *strides,
            SEARCH=rule == SEARCH,
            ROWS=per_program,
            OVERLAPS=overlaps,
            num_warps=_BLOCK_RULE_WARPS,
            **options,
        )
        return
    quantize_write_kernel[(_programs(counts, _ROWS_PER_PROGRAM),)](
        *_tensors(keys),
        *_tensors(query),
        *counts,
        *strides,
        ROWS=_ROWS_PER_PROGRAM,
        OVERLAPS=overlaps,
        num_warps=_WARPS,
        **options,
    )


def _tensors(rows: WriteProblem) -> tuple[torch.Tensor, ...]:
    return rows.values, rows.index, _blocks(rows.codes), rows.scales


def _weights(weights: RuleWeights) -> tuple[torch.Tensor, ...]:
    return weights.factor, weights.within, weights.pivots


def _programs(counts: tuple[int, int], rows: int) -> int:
    return sum(-(-count // rows) for count in counts)


def _blocks(codes: torch.Tensor) -> torch.Tensor:
    """The same bytes, a block's codes in each int64.

    A single page or row may have any stride, which a view as int64 does not take.
    """
    return codes.view(torch.int64) if codes.shape[0] > 1 else codes.flatten().view(torch.int64)


def _vectors(tensor: torch.Tensor) -> int:
    """Stride of the first dimension in vectors of 16 bytes."""
    return tensor.stride(0) * tensor.element_size() // _VECTOR_BYTES
