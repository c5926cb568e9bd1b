"""The only validation of `indexer_scores`: shapes, dtypes, strides, alignments and devices.

It runs before any backend is imported and reads no device values, so that a call costs no
synchronization. What it returns, a frozen `ScoreProblem`, is all that a backend needs to launch.
"""

from __future__ import annotations

import torch

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats.scale_order import tiled_bytes
from sdsa_quant.layout import (
    DIM,
    KEY_ALIGNMENT_BYTES,
    MAX_ROWS,
    PACKED_DIM,
    PAGE,
    SCALE_ALIGNMENT_BYTES,
    SCALES_PER_KEY,
)
from sdsa_quant.paging import BF16, NVFP4

from .problem import MAX_CONTEXT, ScoreProblem


def describe(tensor: object) -> str:
    """``float32 [4, 128]`` for a tensor, the type's name for anything else."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"


def require_tensor(name: str, tensor: object, wanted: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} must be a {wanted} tensor, got {describe(tensor)}")
    if tensor.layout != torch.strided:
        raise DtypeError(f"{name} must be a dense {wanted} tensor, got layout {tensor.layout}")
    return tensor


def require_dtype(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], wanted: str
) -> torch.Tensor:
    checked = require_tensor(name, tensor, wanted)
    if checked.dtype not in dtypes:
        raise DtypeError(f"{name} must be {wanted}, got {describe(checked)}")
    return checked


def require_shape(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], wanted: str
) -> None:
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(f"{name} must be {wanted}, got {describe(tensor)}")


def require_row_contiguous(name: str, tensor: torch.Tensor) -> None:
    """The last dimension is contiguous; a dimension of size 1 or 0 has no stride to speak of."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def require_page_contiguous(name: str, tensor: torch.Tensor) -> None:
    row = tensor.shape[-1]
    if tensor.stride(-1) != 1 or tensor.stride(-2) != row:
        raise InputError(
            f"{name} must be contiguous inside a page: strides (free, {row}, 1), "
            f"got strides {tensor.stride()}"
        )


def require_alignment(name: str, tensor: torch.Tensor, alignment: int) -> None:
    """Pages (or query rows) start at multiples of `alignment` bytes, as vector loads need."""
    if tensor.numel() == 0:
        return
    stride_bytes = tensor.stride(0) * tensor.element_size()
    if tensor.shape[0] > 1 and stride_bytes % alignment:
        raise InputError(
            f"{name} must have a first stride that is a multiple of {alignment} bytes, "
            f"got {stride_bytes} bytes"
        )
    if tensor.data_ptr() % alignment:
        raise InputError(
            f"{name} must start at a multiple of {alignment} bytes, got an address that is "
            f"{tensor.data_ptr() % alignment} bytes past one"
        )


def scale_bytes_of(name: str, tensor: object, wanted: str) -> torch.Tensor:
    checked = require_dtype(name, tensor, (torch.float8_e4m3fn, torch.uint8), wanted)
    return checked.view(torch.uint8)


def _check_tiled_scales(scales: torch.Tensor, pages: int) -> None:
    size = tiled_bytes(pages * PAGE, SCALES_PER_KEY)
    require_shape("key_scales", scales, (size,), f"[{size}] for {pages} pages in 128x4 order")
    require_row_contiguous("key_scales", scales)
    require_alignment("key_scales", scales[None], KEY_ALIGNMENT_BYTES)


def check_scores_call(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lengths: torch.Tensor,
    requests: torch.Tensor,
    scores: torch.Tensor,
    query_scales: torch.Tensor | None,
    key_scales: torch.Tensor | None,
) -> ScoreProblem:
    """Validate one call and return it as a `ScoreProblem`.

    Parameters are those of `sdsa_kernels.indexer_scores`.

    Raises
    ------
    TypeError
        An argument is no tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, or scales are missing or superfluous. The
        message names the argument, what was given and what is needed.
    """
    require_dtype(
        "key_cache",
        key_cache,
        (torch.bfloat16, torch.uint8),
        f"bfloat16 [pages, {PAGE}, {DIM}] or uint8 [pages, {PAGE}, {PACKED_DIM}]",
    )
    key_format = NVFP4 if key_cache.dtype == torch.uint8 else BF16
    if key_format == NVFP4:
        shape, wanted = (None, PAGE, PACKED_DIM), f"uint8 [pages, {PAGE}, {PACKED_DIM}]"
    else:
        shape, wanted = (None, PAGE, DIM), f"bfloat16 [pages, {PAGE}, {DIM}]"
    require_shape("key_cache", key_cache, shape, wanted)
    require_page_contiguous("key_cache", key_cache)
    require_alignment("key_cache", key_cache, KEY_ALIGNMENT_BYTES)
    pages = key_cache.shape[0]

    key_scale_bytes = None
    if key_format == NVFP4:
        wanted = f"float8_e4m3fn or uint8 [{pages}, {PAGE}, {SCALES_PER_KEY}] for NVFP4 keys"
        if key_scales is None:
            raise InputError(f"key_scales must be {wanted}, got None")
        key_scale_bytes = scale_bytes_of("key_scales", key_scales, wanted)
        if key_scale_bytes.dim() == 1:
            _check_tiled_scales(key_scale_bytes, pages)
        else:
            require_shape("key_scales", key_scale_bytes, (pages, PAGE, SCALES_PER_KEY), wanted)
            require_page_contiguous("key_scales", key_scale_bytes)
            require_alignment("key_scales", key_scale_bytes, SCALE_ALIGNMENT_BYTES)
    elif key_scales is not None:
        raise InputError(f"key_scales must be None for BF16 keys, got {describe(key_scales)}")

    if key_format == NVFP4:
        wanted = f"bfloat16 [rows, {DIM}] or uint8 [rows, {PACKED_DIM}]"
        require_dtype("query", query, (torch.bfloat16, torch.uint8), wanted)
    else:
        wanted = f"bfloat16 [rows, {DIM}] for BF16 keys"
        require_dtype("query", query, (torch.bfloat16,), wanted)
    query_format = NVFP4 if query.dtype == torch.uint8 else BF16
    if query_format == NVFP4:
        require_shape("query", query, (None, PACKED_DIM), f"uint8 [rows, {PACKED_DIM}]")
    else:
        require_shape("query", query, (None, DIM), f"bfloat16 [rows, {DIM}]")
    require_row_contiguous("query", query)
    require_alignment("query", query, KEY_ALIGNMENT_BYTES)
    rows = query.shape[0]

    query_scale_bytes = None
    if query_format == NVFP4:
        wanted = f"float8_e4m3fn or uint8 [{rows}, {SCALES_PER_KEY}] for an NVFP4 query"
        if query_scales is None:
            raise InputError(f"query_scales must be {wanted}, got None")
        query_scale_bytes = scale_bytes_of("query_scales", query_scales, wanted)
        require_shape("query_scales", query_scale_bytes, (rows, SCALES_PER_KEY), wanted)
        require_row_contiguous("query_scales", query_scale_bytes)
        require_alignment("query_scales", query_scale_bytes, SCALE_ALIGNMENT_BYTES)
    elif query_scales is not None:
        raise InputError(
            f"query_scales must be None for a BF16 query, got {describe(query_scales)}"
        )

    require_dtype("block_table", block_table, (torch.int32,), "int32 [requests, blocks]")
    require_shape("block_table", block_table, (None, None), "int32 [requests, blocks]")
    require_row_contiguous("block_table", block_table)

    require_dtype("context_lengths", context_lengths, (torch.int32,), "int32 [groups]")
    require_shape("context_lengths", context_lengths, (None,), "int32 [groups]")
    require_row_contiguous("context_lengths", context_lengths)
    groups = context_lengths.shape[0]

    require_dtype("requests", requests, (torch.int32,), f"int32 [{groups}]")
    require_shape(
        "requests", requests, (groups,), f"int32 [{groups}], one entry for each context length"
    )
    require_row_contiguous("requests", requests)

    if groups == 0:
        if rows:
            raise InputError(
                f"query must have 0 rows where context_lengths is empty, got {rows} rows"
            )
        rows_per_group = 1
    else:
        if rows % groups or not 1 <= rows // groups <= MAX_ROWS:
            raise InputError(
                f"query must have 1 to {MAX_ROWS} rows for each of the {groups} groups of "
                f"context_lengths, the same number for every group, got {rows} rows"
            )
        rows_per_group = rows // groups

    require_dtype("scores", scores, (torch.float32,), f"float32 [{rows}, max_context]")
    require_shape("scores", scores, (rows, None), f"float32 [{rows}, max_context]")
    require_row_contiguous("scores", scores)
    max_context = scores.shape[1]
    if max_context > MAX_CONTEXT:
        raise InputError(
            f"scores must have at most {MAX_CONTEXT} columns, which is what 32 bits can count, "
            f"got {max_context}"
        )
    if rows > 1 and scores.stride(0) < max_context:
        raise InputError(
            f"scores must have rows that do not overlap: a row stride of at least {max_context}, "
            f"got {scores.stride(0)}"
        )

    for name, tensor in (
        ("query", query),
        ("query_scales", query_scale_bytes),
        ("key_cache", key_cache),
        ("key_scales", key_scale_bytes),
        ("block_table", block_table),
        ("context_lengths", context_lengths),
        ("requests", requests),
    ):
        if tensor is not None and tensor.device != scores.device:
            raise InputError(
                f"{name} must be on {scores.device}, the device of scores, got {tensor.device}"
            )

    return ScoreProblem(
        query=query,
        query_scales=query_scale_bytes,
        key_cache=key_cache,
        key_scales=key_scale_bytes,
        block_table=block_table,
        context_lengths=context_lengths,
        requests=requests,
        scores=scores,
        rows=rows,
        groups=groups,
        rows_per_group=rows_per_group,
        max_context=max_context,
        query_format=query_format,
        key_format=key_format,
    )
