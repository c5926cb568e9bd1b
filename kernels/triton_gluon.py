"""The scoring kernel for NVIDIA GPUs from SM80, in Gluon: memory to MMA registers, nothing between.

The sum over values may be taken in any order, so each lane may as well hold the values that it can
load with one 16-byte instruction. In an m16n8k16 MMA four lanes share a key. With ``k_width`` 16
(bytes of codes) or 8 (BF16 values), lane ``q`` of the four holds 16 bytes next to each other:

    NVFP4    key row, 64 bytes:   | q=0 | q=1 | q=2 | q=3 |              one load a key
             its 8 scales:        | 0 1 | 2 3 | 4 5 | 6 7 |              one load a key
    BF16     key row, 256 bytes:  | 0 | 1 | 2 | 3 | 0 | 1 | .. | 3 |     four loads a key

Those registers, decoded in place (`triton_unpack`), *are* the key operand: there is no shared
memory and no barrier in the loop, and a program's warps never wait for each other. Query rows are
the other operand, 8 columns wide, so groups of 1 to 8 rows cost the same MMAs, and no variants.

    keys [64, 128]  x  query^T [128, 8]  =  scores^T [64, 8]      FP32 sums, one page a step

Latency is hidden by many small programs (`triton_scores` says how many), and for BF16, whose pages
are large, by loading a page ahead too. The work is shared out by `triton_shares`.

Strides come in vectors (16 bytes of keys, 8 of scales), which says to the compiler that rows are
aligned without a variant for each stride.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .triton_shares import NOT_SPECIALIZED, SCAN, SKIP, clamp_length, find_share, pages_of
from .triton_unpack import (
    BF16_FACTOR,
    FP16_FACTOR,
    decode,
    pairs_layout,
    permuted_byte,
    words_layout,
)

_PAGE = gl.constexpr(64)
_DIM = gl.constexpr(128)
_WORDS = gl.constexpr(16)  # 32-bit words of codes in a key
_PAIRS = gl.constexpr(4)  # pairs of scales in a key
_ROWS = gl.constexpr(8)  # query rows in an MMA
_WORDS_PER_VECTOR = gl.constexpr(4)
_BF16_PER_VECTOR = gl.constexpr(8)
_PAIRS_PER_VECTOR = gl.constexpr(4)


@gluon.jit
def _query_nvfp4(
    query_ptr,
    query_scales_ptr,
    first_row,
    rows_per_group,
    query_stride,
    query_scale_stride,
    OPERAND: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Even and odd values [64, ROWS] of a group's query rows, zero past them, as FP16 operands."""
    WORDS: gl.constexpr = gl.SliceLayout(2, words_layout(_ROWS, WARPS))
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, WORDS))
    word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, WORDS))
    codes = query_ptr + ((first_row + row) * query_stride * _WORDS_PER_VECTOR)[:, None]
    words = gl.load(codes + word[None, :], mask=(row < rows_per_group)[:, None], other=0)

    PAIRS: gl.constexpr = gl.SliceLayout(2, pairs_layout(_ROWS, WARPS))
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, PAIRS))
    scales = (
        query_scales_ptr + ((first_row + row) * query_scale_stride * _PAIRS_PER_VECTOR)[:, None]
    )
    pairs = gl.load(scales + pair[None, :], mask=(row < rows_per_group)[:, None], other=0)

    even, odd = decode(words, pairs, _ROWS, True, WARPS)
    even = gl.convert_layout(gl.permute(even, (1, 0)), OPERAND, assert_trivial=True)
    odd = gl.convert_layout(gl.permute(odd, (1, 0)), OPERAND, assert_trivial=True)
    return even, odd


@gluon.jit
def _query_bf16(query_ptr, first_row, rows_per_group, query_stride, value, OPERAND: gl.constexpr):
    """Values [N, ROWS] of a group's query rows, zero past them; `value` says which N."""
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, OPERAND))
    rows = query_ptr + ((first_row + row) * query_stride * _BF16_PER_VECTOR)[None, :]
    live = (row < rows_per_group)[None, :] & (value >= 0)[:, None]
    return gl.load(rows + value[:, None], mask=live, other=0.0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def score_kernel(
    query_ptr,  # bf16 [rows, 128] or int32 [rows, 16]
    query_scales_ptr,  # uint16 [rows, 4]
    keys_ptr,  # bf16 [pages, 64, 128] or int32 [pages, 64, 16]
    key_scales_ptr,  # uint16 [pages, 64, 4]
    table_ptr,  # int32 [requests, blocks]
    lengths_ptr,  # int32 [groups]
    requests_ptr,  # int32 [groups]
    scores_ptr,  # float32 [rows, max_context]
    groups,
    max_context,
    rows_per_group,
    query_stride: gl.int64,  # vectors of 16 bytes
    query_scale_stride: gl.int64,  # vectors of 8 bytes
    page_stride: gl.int64,  # vectors of 16 bytes
    scale_page_stride: gl.int64,  # vectors of 8 bytes
    table_stride: gl.int64,  # entries
    scores_stride: gl.int64,  # entries
    QUERY_NVFP4: gl.constexpr,
    KEY_NVFP4: gl.constexpr,
    WARPS: gl.constexpr,
):
    RANGE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    group, block, length, request, todo = find_share(
        lengths_ptr,
        requests_ptr,
        groups,
        max_context,
        gl.arange(0, SCAN, layout=RANGE),
        gl.arange(0, SKIP, layout=RANGE),
    )

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    K_WIDTH: gl.constexpr = 16 if KEY_NVFP4 else 8
    KEYS: gl.constexpr = gl.DotOperandLayout(0, SCORES, K_WIDTH)
    QUERY: gl.constexpr = gl.DotOperandLayout(1, SCORES, K_WIDTH)
    # [PAGE, ROWS]
    score_key = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, SCORES))
    score_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, SCORES))
    if KEY_NVFP4:
        # [PAGE, WORDS] and [PAGE, PAIRS]
        WORDS: gl.constexpr = gl.SliceLayout(2, words_layout(_PAGE, WARPS))
        key_word = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, WORDS))[:, None] * _WORDS
        word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, WORDS))[None, :]
        PAIRS: gl.constexpr = gl.SliceLayout(2, pairs_layout(_PAGE, WARPS))
        key_pair = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, PAIRS))[:, None] * _PAIRS
        pair = gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, PAIRS))[None, :]
    else:
        # [PAGE, DIM]
        key_dim = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, KEYS))[:, None] * _DIM
        dim = gl.arange(0, _DIM, layout=gl.SliceLayout(0, KEYS))[None, :]

    while todo > 0:
        steps = gl.minimum(pages_of(length) - block, todo)
        if steps > 0:
            table = table_ptr + request.to(gl.int64) * table_stride + block
            page = gl.load(table).to(gl.int64)
            first_row = group.to(gl.int64) * rows_per_group
            if QUERY_NVFP4:
                query_even, query_odd = _query_nvfp4(
                    query_ptr,
                    query_scales_ptr,
                    first_row,
                    rows_per_group,
                    query_stride,
                    query_scale_stride,
                    QUERY,
                    WARPS,
                )
            elif KEY_NVFP4:
                position = gl.arange(0, _DIM // 2, layout=gl.SliceLayout(1, QUERY))
                value = 2 * permuted_byte(position)
                query_even = _query_bf16(
                    query_ptr, first_row, rows_per_group, query_stride, value, QUERY
                )
                query_odd = _query_bf16(
                    query_ptr, first_row, rows_per_group, query_stride, value + 1, QUERY
                )
            else:
                value = gl.arange(0, _DIM, layout=gl.SliceLayout(1, QUERY))
                query = _query_bf16(
                    query_ptr, first_row, rows_per_group, query_stride, value, QUERY
                )
                keys_of_page = keys_ptr + page * page_stride * _BF16_PER_VECTOR
                keys = gl.load(keys_of_page + key_dim + dim, eviction_policy="evict_first")
                page = gl.load(table + 1, mask=steps > 1, other=0).to(gl.int64)
            scores = scores_ptr + ((first_row + score_row) * scores_stride)[None, :]
            scores += (score_key + block * _PAGE)[:, None]
            left = length - block * _PAGE
            for step in range(steps):
                page_scores = gl.zeros([_PAGE, _ROWS], gl.float32, layout=SCORES)
                if KEY_NVFP4:
                    codes = keys_ptr + page * page_stride * _WORDS_PER_VECTOR
                    words = gl.load(codes + key_word + word, eviction_policy="evict_first")
                    scales = key_scales_ptr + page * scale_page_stride * _PAIRS_PER_VECTOR
                    pairs = gl.load(scales + key_pair + pair, eviction_policy="evict_first")
                    page = gl.load(table + step + 1, mask=step + 1 < steps, other=0).to(gl.int64)
                    even, odd = decode(words, pairs, _PAGE, QUERY_NVFP4, WARPS)
                    even = gl.convert_layout(even, KEYS, assert_trivial=True)
                    odd = gl.convert_layout(odd, KEYS, assert_trivial=True)
                    page_scores = mma_v2(even, query_even, page_scores)
                    page_scores = mma_v2(odd, query_odd, page_scores)
                    page_scores *= FP16_FACTOR * FP16_FACTOR if QUERY_NVFP4 else BF16_FACTOR
                else:
                    next_keys = keys
                    if step + 1 < steps:  # a branch, so that these loads are issued first
                        keys_of_page = keys_ptr + page * page_stride * _BF16_PER_VECTOR
                        next_keys = gl.load(
                            keys_of_page + key_dim + dim, eviction_policy="evict_first"
                        )
                        page = gl.load(table + step + 2, mask=step + 2 < steps, other=0)
                        page = page.to(gl.int64)
                    page_scores = mma_v2(keys, query, page_scores)
                    keys = next_keys
                written = (score_key < left)[:, None] & (score_row < rows_per_group)[None, :]
                gl.store(scores, page_scores, mask=written)
                scores += _PAGE
                left -= _PAGE
            todo -= steps
        group += 1
        block = 0
        if todo > 0:
            length = clamp_length(gl.load(lengths_ptr + group), max_context)
            request = gl.load(requests_ptr + group)
