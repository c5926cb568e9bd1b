"""The only validation of the public calls: shapes, dtypes, strides, alignments and devices.

It runs before any backend is imported and reads no device values, so that a call costs no
synchronization. What it returns, a frozen `ScoreProblem`, is all that a backend needs to launch.
"""

from __future__ import annotations

import torch

from sdsa_quant.errors import DtypeError, InputError
from sdsa_quant.formats.scale_order import tiled_bytes
from sdsa_quant.layout import (
    BF16,
    DIM,
    KEY_ALIGNMENT_BYTES,
    MAX_ROWS,
    NVFP4,
    PACKED_DIM,
    PAGE,
    SCALE_ALIGNMENT_BYTES,
    SCALES_PER_KEY,
)

from .problem import MAX_CONTEXT, CallTensors, ScoreCall, ScoreProblem


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
    """The last dimension is contiguous; the stride of a dimension of size 1 or 0 is never used."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def require_dense_rows(
    name: str, tensor: object, dtype: torch.dtype, shape: tuple[int | None, ...], words: str
) -> None:
    """A tensor of this dtype and shape, in words too; its last dimension is contiguous."""
    wanted = f"{str(dtype).removeprefix('torch.')} {words}"
    checked = require_dtype(name, tensor, (dtype,), wanted)
    require_shape(name, checked, shape, wanted)
    require_row_contiguous(name, checked)


def require_separate_rows(name: str, tensor: torch.Tensor, row: int) -> None:
    """The first dimension's stride is free, as long as no two of its entries share memory."""
    if tensor.shape[0] > 1 and tensor.stride(0) < row:
        raise InputError(
            f"{name} must have rows that do not overlap: a first stride of at least {row}, "
            f"got {tensor.stride(0)}"
        )


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


# dtype and width of a row of values in each format.
_VALUES = {BF16: (torch.bfloat16, DIM), NVFP4: (torch.uint8, PACKED_DIM)}


def _in_words(value_format: str, outer: str) -> str:
    dtype, width = _VALUES[value_format]
    return f"{str(dtype).removeprefix('torch.')} [{outer}, {width}]"


def _format_of(
    name: str, tensor: object, formats: tuple[str, ...], outer: str, note: str = ""
) -> str:
    """Format of a tensor by its dtype, one of `formats`."""
    wanted = " or ".join(_in_words(each, outer) for each in formats) + note
    checked = require_dtype(name, tensor, tuple(_VALUES[each][0] for each in formats), wanted)
    return NVFP4 if checked.dtype == torch.uint8 else BF16


def check_pages(key_cache: torch.Tensor, formats: tuple[str, ...]) -> str:
    """Check `key_cache` and return its format, one of `formats`."""
    outer = f"pages, {PAGE}"
    found = _format_of("key_cache", key_cache, formats, outer)
    shape = (None, PAGE, _VALUES[found][1])
    require_shape("key_cache", key_cache, shape, _in_words(found, outer))
    require_page_contiguous("key_cache", key_cache)
    require_alignment("key_cache", key_cache, KEY_ALIGNMENT_BYTES)
    return found


def check_rows(name: str, rows: torch.Tensor, formats: tuple[str, ...], note: str = "") -> str:
    """Check query rows and return their format, one of `formats`; `note` says why these."""
    found = _format_of(name, rows, formats, "rows", note)
    require_shape(name, rows, (None, _VALUES[found][1]), _in_words(found, "rows"))
    require_row_contiguous(name, rows)
    require_alignment(name, rows, KEY_ALIGNMENT_BYTES)
    return found


def check_page_scales(
    key_scales: torch.Tensor | None, pages: int, *, may_be_tiled: bool
) -> torch.Tensor:
    """Check the scales of NVFP4 pages and return their bytes."""
    wanted = f"float8_e4m3fn or uint8 [{pages}, {PAGE}, {SCALES_PER_KEY}] for NVFP4 keys"
    if key_scales is None:
        raise InputError(f"key_scales must be {wanted}, got None")
    scale_bytes = scale_bytes_of("key_scales", key_scales, wanted)
    if may_be_tiled and scale_bytes.dim() == 1:
        _check_tiled_scales(scale_bytes, pages)
        return scale_bytes
    require_shape("key_scales", scale_bytes, (pages, PAGE, SCALES_PER_KEY), wanted)
    require_page_contiguous("key_scales", scale_bytes)
    require_alignment("key_scales", scale_bytes, SCALE_ALIGNMENT_BYTES)
    return scale_bytes


def _check_tiled_scales(scales: torch.Tensor, pages: int) -> None:
    size = tiled_bytes(pages * PAGE, SCALES_PER_KEY)
    require_shape("key_scales", scales, (size,), f"[{size}] for {pages} pages in 128x4 order")
    require_row_contiguous("key_scales", scales)
    require_alignment("key_scales", scales[None], KEY_ALIGNMENT_BYTES)


def check_row_scales(query_scales: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Check the scales of NVFP4 query rows and return their bytes."""
    wanted = f"float8_e4m3fn or uint8 [{rows}, {SCALES_PER_KEY}] for an NVFP4 query"
    if query_scales is None:
        raise InputError(f"query_scales must be {wanted}, got None")
    scale_bytes = scale_bytes_of("query_scales", query_scales, wanted)
    require_shape("query_scales", scale_bytes, (rows, SCALES_PER_KEY), wanted)
    require_row_contiguous("query_scales", scale_bytes)
    require_alignment("query_scales", scale_bytes, SCALE_ALIGNMENT_BYTES)
    return scale_bytes


def require_device(name: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    """`tensor` is a tensor, on the device of the argument `owner`."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor, got {describe(tensor)}")
    if tensor.device != device:
        raise InputError(f"{name} must be on {device}, the device of {owner}, got {tensor.device}")


def _check_keys(
    key_cache: torch.Tensor, key_scales: torch.Tensor | None
) -> tuple[str, torch.Tensor | None]:
    """Format of the keys, and the bytes of their scales."""
    key_format = check_pages(key_cache, (BF16, NVFP4))
    if key_format == NVFP4:
        return key_format, check_page_scales(key_scales, key_cache.shape[0], may_be_tiled=True)
    if key_scales is not None:
        raise InputError(f"key_scales must be None for BF16 keys, got {describe(key_scales)}")
    return key_format, None


def _check_query(
    query: torch.Tensor, query_scales: torch.Tensor | None, key_format: str
) -> tuple[str, torch.Tensor | None]:
    """Format of the query rows, and the bytes of their scales."""
    if key_format == NVFP4:
        query_format = check_rows("query", query, (BF16, NVFP4))
    else:
        query_format = check_rows("query", query, (BF16,), " for BF16 keys")
    if query_format == NVFP4:
        return query_format, check_row_scales(query_scales, query.shape[0])
    if query_scales is not None:
        raise InputError(
            f"query_scales must be None for a BF16 query, got {describe(query_scales)}"
        )
    return query_format, None


def _check_tables(
    block_table: torch.Tensor, context_lengths: torch.Tensor, requests: torch.Tensor
) -> int:
    """Number of groups."""
    words = "[requests, blocks]"
    require_dense_rows("block_table", block_table, torch.int32, (None, None), words)
    require_dense_rows("context_lengths", context_lengths, torch.int32, (None,), "[groups]")
    groups = context_lengths.shape[0]
    words = f"[{groups}], one entry for each context length"
    require_dense_rows("requests", requests, torch.int32, (groups,), words)
    return groups


def _rows_per_group(rows: int, groups: int) -> int:
    if groups == 0:
        if rows:
            raise InputError(
                f"query must have 0 rows where context_lengths is empty, got {rows} rows"
            )
        return 1
    if rows % groups or not 1 <= rows // groups <= MAX_ROWS:
        raise InputError(
            f"query must have 1 to {MAX_ROWS} rows for each of the {groups} groups of "
            f"context_lengths, the same number for every group, got {rows} rows"
        )
    return rows // groups


def _check_scores(scores: torch.Tensor, rows: int) -> None:
    words = f"[{rows}, max_context]"
    require_dense_rows("scores", scores, torch.float32, (rows, None), words)
    max_context = scores.shape[1]
    if max_context > MAX_CONTEXT:
        raise InputError(
            f"scores must have at most {MAX_CONTEXT} columns, which is what 32 bits can count, "
            f"got {max_context}"
        )
    require_separate_rows("scores", scores, max_context)


def _require_apart(output: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    """Refuse scores that lie over an input, which would change while it is read."""
    ours, theirs = _extent(output), _extent(tensor)
    if ours[0] < theirs[1] and theirs[0] < ours[1]:
        raise InputError(f"scores must not overlap {name} in memory")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor, and the one behind its last; nothing where it has no memory."""
    start = 0 if tensor.is_meta else tensor.data_ptr()
    if not start or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_scores_call(call: CallTensors) -> ScoreProblem:
    """Validate the tensors of one call of `indexer_scores`.

    Raises
    ------
    TypeError
        An argument is not a tensor or has the wrong dtype.
    ValueError
        A shape, stride, alignment or device is wrong, scales are missing or superfluous, or scores
        overlap an input. The message names the argument, what was given and what is needed.
    """
    call = ScoreCall(*call)
    key_format, key_scale_bytes = _check_keys(call.key_cache, call.key_scales)
    query_format, query_scale_bytes = _check_query(call.query, call.query_scales, key_format)
    groups = _check_tables(call.block_table, call.context_lengths, call.requests)
    rows = call.query.shape[0]
    rows_per_group = _rows_per_group(rows, groups)
    _check_scores(call.scores, rows)
    checked = call._replace(query_scales=query_scale_bytes, key_scales=key_scale_bytes)
    for name, tensor in checked._asdict().items():
        if tensor is not None:
            require_device(name, tensor, call.scores.device, "scores")
            if name != "scores":
                _require_apart(call.scores, name, tensor)
    return ScoreProblem(
        **checked._asdict(),
        rows=rows,
        groups=groups,
        rows_per_group=rows_per_group,
        max_context=call.scores.shape[1],
        query_format=query_format,
        key_format=key_format,
    )
