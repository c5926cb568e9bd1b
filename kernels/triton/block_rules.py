"""The Triton kernel of `quantize_write_nvfp4` by the rules that choose a scale: 4over6 and search.

Every bit is that of `sdsa_quant.formats.nvfp4` and `scale_search`, which have the definitions. A
thread has a block and tries one scale after another. Squares are added as a tree, value ``i`` and
``i + 8`` first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import code_bytes, load_block, nearest_code, scale_value
from .quantize import divide_by_6, inverse_of_scale, round_to_e4m3

_PAGE_BITS = tl.constexpr(6)
_IN_PAGE = tl.constexpr(2**6 - 1)
_BLOCKS = tl.constexpr(8)
_E4M3_MAX = tl.constexpr(448.0)
_NVFP4_MAX = tl.constexpr(2688.0)
_LAST_SCALE = tl.constexpr(0x7E)
_MAX_SCALES = tl.constexpr(11)


@triton.jit
def _squared_error(x, scales):
    """Sum of ``(code * scale - x)^2`` over the 16 values of a block."""
    inverse, scale = inverse_of_scale(scales), scale_value(scales)
    squares = ()
    for j in tl.static_range(16):
        magnitude = tl.abs(x[j])
        error = nearest_code(magnitude * inverse) * scale - magnitude
        squares = squares + (error * error,)
    for level in tl.static_range(4):
        sums = ()
        for j in tl.static_range(8 >> level):
            sums = sums + (squares[j] + squares[j + (8 >> level)],)
        squares = sums
    return squares[0]


@triton.jit
def _scales_to_try(amax, base):
    """First and last byte of the scales from ``amax / 8`` to ``amax / 3.5``, and `base`."""
    quotient = tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 3.5, tl.float32)), _E4M3_MAX)
    nearest = round_to_e4m3(quotient)
    last = tl.maximum(nearest - (scale_value(nearest) > quotient).to(tl.int32), base)
    quotient = tl.minimum(amax * 0.125, _E4M3_MAX)
    nearest = round_to_e4m3(quotient)
    first = tl.minimum(nearest + (scale_value(nearest) < quotient).to(tl.int32), _LAST_SCALE)
    return tl.minimum(first, base), last


@triton.jit
def _best_scale(x, SEARCH: tl.constexpr):
    amax = tl.maximum(tl.abs(x[0]), 0.0)
    whole = x[0] == x[0]
    for j in tl.static_range(1, 16):
        amax = tl.maximum(amax, tl.abs(x[j]))
        whole = whole & (x[j] == x[j])
    best = round_to_e4m3(divide_by_6(tl.minimum(amax, _NVFP4_MAX)))
    if SEARCH:
        first, last = _scales_to_try(amax, best)
        least = tl.full(amax.shape, float("inf"), tl.float32)
        for step in range(_MAX_SCALES):
            tried = tl.maximum(last - step, first)
            error = _squared_error(x, tried)
            best = tl.where((error < least) & whole, tried, best)
            least = tl.minimum(error, least)
    else:
        larger = round_to_e4m3(tl.minimum(amax * 0.25, _E4M3_MAX))
        better = _squared_error(x, larger) < _squared_error(x, best)
        best = tl.where(better & whole, larger, best)
    return best


@triton.jit
def _write_rows(
    x_ptr,
    index_ptr,
    codes_ptr,
    scales_ptr,
    count,
    x_stride,
    codes_stride,
    scales_stride,
    tile,
    paged,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantize one tile of `ROWS` rows and write each to its index; negative ones are skipped."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = dtype.primitive_bitwidth // 4
    thread = tl.arange(0, ROWS * _BLOCKS)
    row = tile * ROWS + thread // _BLOCKS
    block = thread % _BLOCKS
    index = tl.load(index_ptr + row, mask=row < count, other=-1)
    live = index >= 0
    words = x_ptr.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * x_stride * 4)
    x = load_block(words + block * (2 * WORDS), live, dtype)
    scales = _best_scale(x, SEARCH)
    inverse = inverse_of_scale(scales)
    codes = ()
    for j in tl.static_range(16):
        codes = codes + (nearest_code(x[j] * inverse),)
    record = tl.where(paged, index >> _PAGE_BITS, index)
    block += tl.where(paged, (index & _IN_PAGE).to(tl.int32) * _BLOCKS, 0)
    tl.store(codes_ptr + (record * codes_stride * 2 + block), code_bytes(codes, x), mask=live)
    tl.store(scales_ptr + (record * scales_stride + block), scales.to(tl.uint8), mask=live)


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "key_cache_ptr",
        "query_rows_ptr",
        "packed_query_ptr",
        "key_scales_ptr",
        "query_scales_ptr",
        "keys",
        "queries",
        "key_stride",
        "query_stride",
        "page_stride",
        "scale_page_stride",
        "packed_stride",
        "query_scale_stride",
    ]
)
def write_block_rule_kernel(
    key_ptr,  # bf16, fp16 or fp32 [keys, 128]
    slots_ptr,  # int64 [keys]
    key_cache_ptr,  # int64 [pages, 64, 8]
    key_scales_ptr,  # uint8 [pages, 64, 8]
    query_ptr,  # like key_ptr [queries, 128]
    query_rows_ptr,  # int64 [queries]
    packed_query_ptr,  # int64 [rows, 8]
    query_scales_ptr,  # uint8 [rows, 8]
    keys,
    queries,
    key_stride: tl.int64,  # vectors of 16 bytes
    query_stride: tl.int64,
    page_stride: tl.int64,
    packed_stride: tl.int64,
    scale_page_stride: tl.int64,  # bytes
    query_scale_stride: tl.int64,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:  # `launch` says why, and why before anything else
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    key_tiles = tl.cdiv(keys, ROWS)
    x_ptr, index_ptr, codes_ptr, scales_ptr = key_ptr, slots_ptr, key_cache_ptr, key_scales_ptr
    x_stride, codes_stride, scales_stride = key_stride, page_stride, scale_page_stride
    count = keys
    paged = tile < key_tiles
    if tile >= key_tiles:
        x_ptr, index_ptr = query_ptr, query_rows_ptr
        codes_ptr, scales_ptr = packed_query_ptr, query_scales_ptr
        x_stride, codes_stride, scales_stride = query_stride, packed_stride, query_scale_stride
        count = queries
        tile -= key_tiles
    _write_rows(
        tl.multiple_of(x_ptr, 16),
        index_ptr,
        codes_ptr,
        scales_ptr,
        count,
        x_stride,
        codes_stride,
        scales_stride,
        tile,
        paged,
        SEARCH,
        ROWS,
    )
