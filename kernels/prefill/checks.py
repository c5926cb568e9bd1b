"""The validation of the prefill calls: shapes, dtypes, strides and devices, no device values."""

from __future__ import annotations

import torch

from sdsa_kernels.checks import (
    check_page_scales,
    check_pages,
    require_dense_rows,
    require_device,
    require_dtype,
    require_separate_rows,
    require_shape,
    scale_bytes_of,
)
from sdsa_kernels.problem import MAX_CONTEXT
from sdsa_quant.arguments import checked_argument
from sdsa_quant.errors import InputError
from sdsa_quant.layout import BF16, DIM, MAX_TOP_K, NVFP4, PACKED_DIM, PAGE, SCALES_PER_KEY

TILE_ROWS = 128  # query rows of a tile, and what sample slots come in
_OFFSETS = 256  # values of a uint8


def _require_devices(owner: str, device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            require_device(name, tensor, device, owner)


def _check_pairs(candidates: torch.Tensor, rows: int | None) -> None:
    outer = "rows" if rows is None else rows
    words = f"[{outer}, slots, 2]"
    require_dense_rows("candidates", candidates, torch.int32, (rows, None, 2), words)
    if candidates.shape[1] > 1 and candidates.stride(1) != 2:
        raise InputError(
            f"must have contiguous rows, got strides {candidates.stride()}", argument="candidates"
        )
    require_separate_rows("candidates", candidates, 2 * candidates.shape[1])


def check_threshold_select(
    query: torch.Tensor,
    row_ends: torch.Tensor,
    tile_requests: torch.Tensor,
    block_table: torch.Tensor,
    thresholds: torch.Tensor,
    counters: torch.Tensor,
    candidates: torch.Tensor,
    max_context: int,
    top_k: int,
    query_scales: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    ranges: torch.Tensor | None,
) -> None:
    """Validate what `indexer_threshold_select` does not hand on to `indexer_scores`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, device or number is wrong.
    """
    require_dtype("query", query, (torch.bfloat16, torch.uint8), "bfloat16 or uint8 [rows, n]")
    require_shape("query", query, (None, None), "bfloat16 or uint8 [rows, n]")
    rows = query.shape[0]
    tiles = -(-rows // TILE_ROWS)
    require_dense_rows("row_ends", row_ends, torch.int32, (rows,), f"[{rows}]")
    words = f"[{tiles}], one entry for every {TILE_ROWS} rows"
    require_dense_rows("tile_requests", tile_requests, torch.int32, (tiles,), words)
    require_dense_rows("block_table", block_table, torch.int32, (None, None), "[requests, blocks]")
    require_dense_rows("thresholds", thresholds, torch.float32, (rows,), f"[{rows}]")
    require_dense_rows("counters", counters, torch.int32, (rows, 2), f"[{rows}, 2]")
    require_separate_rows("counters", counters, 2)
    checked_argument("top_k", top_k, int)
    checked_argument("max_context", max_context, int)
    if not 1 <= top_k <= MAX_TOP_K:
        raise InputError(f"must be 1 to {MAX_TOP_K}, got {top_k}", argument="top_k")
    room = min(block_table.shape[1] * PAGE, MAX_CONTEXT)
    if not 0 <= max_context <= room:
        raise InputError(
            f"must be 0 to {room}, the keys that the block table covers, got {max_context}",
            argument="max_context",
        )
    _check_pairs(candidates, rows)
    if candidates.shape[1] < top_k:
        raise InputError(
            f"must have at least {top_k} slots, one for each tie of a top-k, "
            f"got {candidates.shape[1]}",
            argument="candidates",
        )
    if (arrivals is None) != (ranges is None):
        raise InputError("must be given together with ranges, or not at all", argument="arrivals")
    if arrivals is not None and ranges is not None:
        require_dense_rows("arrivals", arrivals, torch.int32, (tiles,), words)
        require_dense_rows("ranges", ranges, torch.int32, (2, rows), f"[2, {rows}]")
        require_separate_rows("ranges", ranges, rows)
    _require_devices(
        "query",
        query.device,
        row_ends=row_ends,
        tile_requests=tile_requests,
        block_table=block_table,
        thresholds=thresholds,
        counters=counters,
        candidates=candidates,
        query_scales=query_scales,
        arrivals=arrivals,
        ranges=ranges,
    )


def check_candidates(
    candidates: torch.Tensor, ranges: torch.Tensor, top_keys: torch.Tensor
) -> None:
    """Validate a call of `top_k_from_candidates`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride or device is wrong.
    """
    _check_pairs(candidates, None)
    rows = candidates.shape[0]
    require_dense_rows("ranges", ranges, torch.int32, (2, rows), f"[2, {rows}]")
    require_dense_rows("top_keys", top_keys, torch.int32, (rows, None), f"[{rows}, top_k]")
    if not 1 <= top_keys.shape[1] <= MAX_TOP_K:
        raise InputError(
            f"must have 1 to {MAX_TOP_K} columns, got {top_keys.shape[1]}", argument="top_keys"
        )
    require_separate_rows("top_keys", top_keys, top_keys.shape[1])
    _require_devices("candidates", candidates.device, ranges=ranges, top_keys=top_keys)


def check_sample(
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    offsets: torch.Tensor,
    sample_ends: torch.Tensor,
    sample_keys: torch.Tensor,
    samples_per_run: int,
    pages_per_run: int,
    key_scales: torch.Tensor | None,
    sample_scales: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Validate a call of `gather_key_sample`; bytes of both scales, None for BF16 keys.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, device or number is wrong, or scales are missing or superfluous.
    """
    key_format = check_pages(key_cache, (BF16, NVFP4))
    require_dense_rows("block_table", block_table, torch.int32, (None, None), "[requests, blocks]")
    requests = block_table.shape[0]
    require_dense_rows("offsets", offsets, torch.uint8, (None,), "[capacity]")
    capacity = offsets.shape[0]
    if capacity % TILE_ROWS:
        raise InputError(f"must be a multiple of {TILE_ROWS}, got {capacity}", argument="offsets")
    require_dense_rows("sample_ends", sample_ends, torch.int32, (requests,), f"[{requests}]")
    width = PACKED_DIM if key_format == NVFP4 else DIM
    shape = (requests, capacity, width)
    require_dense_rows("sample_keys", sample_keys, key_cache.dtype, shape, str(list(shape)))
    _require_dense_requests("sample_keys", sample_keys)
    for name, number, most in (
        ("samples_per_run", samples_per_run, MAX_CONTEXT),
        ("pages_per_run", pages_per_run, _OFFSETS // PAGE),
    ):
        checked_argument(name, number, int)
        if not 1 <= number <= most:
            raise InputError(f"must be 1 to {most}, got {number}", argument=name)
    _require_devices(
        "key_cache",
        key_cache.device,
        block_table=block_table,
        offsets=offsets,
        sample_ends=sample_ends,
        sample_keys=sample_keys,
        key_scales=key_scales,
        sample_scales=sample_scales,
    )
    if key_format == BF16:
        for name, given in (("key_scales", key_scales), ("sample_scales", sample_scales)):
            if given is not None:
                raise InputError("must be None for BF16 keys", argument=name)
        return None, None
    scale_bytes = check_page_scales(key_scales, key_cache.shape[0], may_be_tiled=False)
    shape = (requests, capacity, SCALES_PER_KEY)
    wanted = f"float8_e4m3fn or uint8 {list(shape)} for NVFP4 keys"
    if sample_scales is None:
        raise InputError(f"must be {wanted}, got None", argument="sample_scales")
    sample_bytes = scale_bytes_of("sample_scales", sample_scales, wanted)
    require_shape("sample_scales", sample_bytes, shape, wanted)
    _require_dense_requests("sample_scales", sample_bytes)
    return scale_bytes, sample_bytes


def _require_dense_requests(name: str, tensor: torch.Tensor) -> None:
    """Rows of a request follow each other, so that they can be viewed as pages."""
    if not tensor[:1].is_contiguous():
        raise InputError(
            f"must be contiguous inside a request, got strides {tensor.stride()}", argument=name
        )
    require_separate_rows(name, tensor, tensor.shape[1] * tensor.shape[2])


def check_sample_thresholds(
    sample_scores: torch.Tensor,
    sample_top: torch.Tensor,
    thresholds: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Validate a call of `thresholds_from_sample`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride or device is wrong.
    """
    require_dense_rows(
        "sample_scores", sample_scores, torch.float32, (None, None), "[rows, samples]"
    )
    rows = sample_scores.shape[0]
    require_dense_rows("sample_top", sample_top, torch.int32, (rows, None), f"[{rows}, rank]")
    if sample_top.shape[1] < 1:
        raise InputError("must have at least 1 column, got 0", argument="sample_top")
    require_dense_rows("thresholds", thresholds, torch.float32, (rows,), f"[{rows}]")
    require_dense_rows("counters", counters, torch.int32, (rows, 2), f"[{rows}, 2]")
    require_separate_rows("counters", counters, 2)
    _require_devices(
        "sample_scores",
        sample_scores.device,
        sample_top=sample_top,
        thresholds=thresholds,
        counters=counters,
    )
