"""How a call reaches a CuTe DSL kernel: its arguments in the order of the kernel's parameters."""

from __future__ import annotations

import torch

from sdsa_quant.errors import InputError
from sdsa_quant.layout import DIM, KEY_ALIGNMENT_BYTES, PACKED_DIM, PAGE

from .availability import device_index
from .checks import NVFP4, ScoreProblem
from .cute_loading import loaded_kernel
from .cute_variants import TENSOR_CORE_VARIANTS
from .plans import Plan

_PREFETCHED_TABLE_BYTES = 256 * 1024
_SCORE_VECTOR_BYTES = 16  # scores are written this wide where every row allows it

# Widths of boxes of the tensor maps, and the columns of the MMAs (see cute_tcgen05_tiles).
_BOX_BYTES = {"nvfp4": 64, "bf16": 128}
_COLUMNS = {"nvfp4": 8, "bf16": 16}


def plan_for(problem: ScoreProblem, variant: str) -> Plan:
    """The launch of `problem` with a variant, loaded if need be, but for the addresses.

    Raises
    ------
    UnsupportedError
        The kernel cannot be loaded here or now (see `loaded_kernel`).
    """
    if variant in TENSOR_CORE_VARIANTS:
        return _tensor_core_plan(problem, variant)
    return _warp_plan(problem, variant)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _prefetched_table_bytes(table: torch.Tensor) -> int:
    """Bytes of the block table to prefetch: all of a small one, nothing of a large one.

    Which entries a launch needs it only knows once it has read the lengths, and reading what a wide
    table has beyond them would make the cost follow the capacity.
    """
    size = 4 * (table.stride(0) * (table.shape[0] - 1) + table.shape[1])
    return size if 0 < size <= _PREFETCHED_TABLE_BYTES else 0


def _warp_plan(problem: ScoreProblem, variant: str) -> Plan:
    device = device_index(problem.device)
    kernel = loaded_kernel(device, variant)
    query_scales, key_scales = problem.query_scales, problem.key_scales
    groups, rows, width = problem.groups, problem.rows_per_group, problem.max_context
    query_bytes, key_bytes = _row_bytes(problem.query), _row_bytes(problem.key_cache)
    query_scale_bytes = 0 if query_scales is None else query_scales.stride(0)
    key_scale_bytes = 0 if key_scales is None else key_scales.stride(0)
    table_bytes, score_bytes = _row_bytes(problem.block_table), _row_bytes(problem.scores)
    prefetched = _prefetched_table_bytes(problem.block_table)
    current_device = torch.cuda.current_device
    # The handle alone; torch.cuda.current_stream() makes an object around it, at 1.5 us a call.
    current_stream = torch._C._cuda_getCurrentRawStream

    def plan(
        query: int,
        query_scale: int,
        key: int,
        key_scale: int,
        table: int,
        lengths: int,
        requests: int,
        scores: int,
    ) -> None:
        if current_device() != device:
            with torch.cuda.device(device):
                plan(query, query_scale, key, key_scale, table, lengths, requests, scores)
            return
        # In the order of the kernel's parameters (see cute_kernel).
        arguments = (
            query,
            query_bytes,
            query_scale,
            query_scale_bytes,
            key,
            key_bytes,
            key_scale,
            key_scale_bytes,
            table,
            table_bytes,
            lengths,
            requests,
            scores,
            score_bytes,
            groups,
            rows,
            width,
            int((scores | score_bytes) % _SCORE_VECTOR_BYTES == 0),
        )
        kernel.launch(arguments, groups, width, prefetched, current_stream(device))

    return plan


def _tensor_core_plan(problem: ScoreProblem, variant: str) -> Plan:
    from .cute_tensor_maps import encode_tensor_map

    device = device_index(problem.device)
    kernel = loaded_kernel(device, variant)
    query_scales, key_scales = problem.query_scales, problem.key_scales
    groups, rows, width = problem.groups, problem.rows_per_group, problem.max_context
    key_bytes = PACKED_DIM if problem.key_format == NVFP4 else 2 * DIM
    box = _BOX_BYTES[problem.key_format]
    key_sizes = (key_bytes, PAGE, problem.key_cache.shape[0])
    key_strides = (key_bytes, _stride_between(problem.key_cache))
    key_box = (box, PAGE, 1)
    query_sizes = (key_bytes, problem.rows)
    query_strides = (_stride_between(problem.query),)
    query_box = (box, _COLUMNS[problem.key_format])
    query_scale_bytes = 0 if query_scales is None else query_scales.stride(0)
    key_scale_bytes = 0 if key_scales is None or problem.tiled_scales else key_scales.stride(0)
    scale_mask = KEY_ALIGNMENT_BYTES - 1 if problem.tiled_scales else 0
    table_bytes, score_bytes = _row_bytes(problem.block_table), _row_bytes(problem.scores)
    prefetched = _prefetched_table_bytes(problem.block_table)
    current_device = torch.cuda.current_device
    current_stream = torch._C._cuda_getCurrentRawStream

    def plan(
        query: int,
        query_scale: int,
        key: int,
        key_scale: int,
        table: int,
        lengths: int,
        requests: int,
        scores: int,
    ) -> None:
        if current_device() != device:
            with torch.cuda.device(device):
                plan(query, query_scale, key, key_scale, table, lengths, requests, scores)
            return
        if key_scale & scale_mask:
            raise InputError(
                f"key_scales must start at a multiple of {KEY_ALIGNMENT_BYTES} bytes, got an "
                f"address that is {key_scale & scale_mask} bytes past one"
            )
        # In the order of the kernel's parameters (see cute_tcgen05_kernel).
        arguments = (
            encode_tensor_map(key, key_sizes, key_strides, key_box),
            encode_tensor_map(query, query_sizes, query_strides, query_box),
            query_scale,
            query_scale_bytes,
            key_scale,
            key_scale_bytes,
            table,
            table_bytes,
            lengths,
            requests,
            scores,
            score_bytes,
            groups,
            rows,
            width,
        )
        kernel.launch(arguments, groups, width, prefetched, current_stream(device))

    return plan


def _stride_between(tensor: torch.Tensor) -> int:
    """Bytes between pages or rows; of a single one its size, any multiple of 16 would do."""
    if tensor.shape[0] == 1:
        return tensor.numel() * tensor.element_size()
    return _row_bytes(tensor)
