"""The scoring kernel for NVIDIA GPUs from SM80, in Gluon, where layouts are ours to choose.

    keys [64, 128]  x  query^T [128, 8]  =  scores^T [64, 8]      FP32 sums, one page a step

Query rows are the 8-column operand of m16n8k16 MMAs, so groups of 1 to 8 rows cost the same MMAs,
and no variants. `shares` shares out the work. What differs is how keys get to the MMAs.

**NVFP4: memory to registers, nothing between.** The sum over values may be taken in any order, so
each lane may as well hold the values that it can load with one instruction. Four lanes share a key:

    a key's codes, 64 bytes:   | q=0 | q=1 | q=2 | q=3 |        one 16-byte load a lane
    its 8 scales:              | 0 1 | 2 3 | 4 5 | 6 7 |        one 2-byte load a lane

Decoded in place (`unpack`), those registers are the key operand with ``k_width`` 16: no
shared memory, no barrier in the loop. Latency is hidden by many small programs (`backend`)
and on SM90 by asking the L2 cache for a page one step before it is loaded, which takes no register.

**BF16: a ring of pages in shared memory.** A page is 16 KB, too much for registers to have enough
of them in flight, and four lanes a key would load it in pieces of 64 bytes. Asynchronous copies of
whole rows, two pages ahead, read 0.97 of what memory allows, where loads to registers read 0.93.
A warp copies the rows that it multiplies.

Strides come in vectors (16 bytes of keys, 8 of scales), which says to the compiler that rows are
aligned without a variant for each stride.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .shares import FEW, NOT_SPECIALIZED, SCAN, SKIP, clamp_length, find_share, pages_of
from .unpack import BF16_FACTOR, FP16_FACTOR, decode, pairs_layout, permuted_byte, words_layout

_PAGE = gl.constexpr(64)
_DIM = gl.constexpr(128)
_WORDS = gl.constexpr(16)  # 32-bit words of codes in a key
_PAIRS = gl.constexpr(4)  # pairs of scales in a key
_ROWS = gl.constexpr(8)  # query rows in an MMA
_WORDS_PER_VECTOR = gl.constexpr(4)
_BF16_PER_VECTOR = gl.constexpr(8)
_PAIRS_PER_VECTOR = gl.constexpr(4)
_STAGES = gl.constexpr(3)  # BF16 pages in the ring: one multiplied, two on their way

# $1, $2: addresses of a page's codes and scales. $3: 1, or 0 for no page. One thread asks for all
# of it, from multiples of 16 bytes. The warp meets, or the compiler would move a prefetch to the
# end of the step.
_PREFETCH = gl.constexpr("""
{
.reg .pred first;
.reg .b32 thread, pages;
.reg .b64 scales;
and.b64 scales, $2, -16;
mov.u32 thread, %tid.x;
cvt.u32.u64 pages, $3;
setp.lt.u32 first, thread, pages;
@first cp.async.bulk.prefetch.L2.global [$1], 4096;
@first cp.async.bulk.prefetch.L2.global [scales], 512;
bar.warp.sync 0xffffffff;
mov.u32 $0, 0;
}
""")

# Its name until Triton 3.8.
_copy_to_shared = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.constexpr_function
def _copy_layout(warps: int) -> gl.DistributedLinearLayout:
    """[64, 128] BF16: two whole rows an instruction, of the rows that the warp multiplies."""
    steps = warps.bit_length() - 1
    rows = [[2, 0], [4, 0], [8, 0]]
    row = 16 * warps
    while row < 64:
        rows.append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *rows],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        [[16 << i, 0] for i in range(steps)],
        [],
        [64, 128],
    )


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


@gluon.jit
def _prefetch_page(codes, scales, wanted):
    """Ask the L2 cache for a page of NVFP4 keys at these addresses."""
    gl.inline_asm_elementwise(
        _PREFETCH,
        "=r,l,l,l",
        [codes.to(gl.int64), scales.to(gl.int64), wanted.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_group(lengths_ptr, requests_ptr, group, groups, max_context):
    """Clamped length and request of a group; 0 and 0 past the last one."""
    length = gl.load(lengths_ptr + group, mask=group < groups, other=0)
    request = gl.load(requests_ptr + group, mask=group < groups, other=0)
    return clamp_length(length, max_context), request


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
    SM90: gl.constexpr,  # whether there are overlapping launches (`launch`) and prefetches
):
    if SM90:
        if not KEY_NVFP4:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    RANGE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    group, block, length, request, todo = find_share(
        lengths_ptr,
        requests_ptr,
        groups,
        max_context,
        gl.arange(0, FEW, layout=RANGE),
        gl.arange(0, SCAN, layout=RANGE),
        gl.arange(0, SKIP, layout=RANGE),
    )

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    K_WIDTH: gl.constexpr = 16 if KEY_NVFP4 else 2
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
        COPY: gl.constexpr = _copy_layout(WARPS)
        key_dim = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, COPY))[:, None] * _DIM
        dim = gl.arange(0, _DIM, layout=gl.SliceLayout(0, COPY))[None, :]
        # [STAGES, PAGE, DIM]
        RING: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
        ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _PAGE, _DIM], RING)

    # Two groups ahead of the one that is scored: what a group of one page would wait for is here.
    table = table_ptr + request.to(gl.int64) * table_stride + block
    first_page = gl.load(table, mask=todo > 0, other=0)
    next_length, next_request = _load_group(
        lengths_ptr, requests_ptr, group + 1, groups, max_context
    )
    while todo > 0:
        steps = gl.minimum(pages_of(length) - block, todo)
        next_table = table_ptr + next_request.to(gl.int64) * table_stride
        next_page = gl.load(next_table, mask=next_length > 0, other=0)
        last_length, last_request = _load_group(
            lengths_ptr, requests_ptr, group + 2, groups, max_context
        )
        if steps > 0:
            page = first_page.to(gl.int64)
            if KEY_NVFP4:
                if SM90:
                    codes = keys_ptr + page * page_stride * _WORDS_PER_VECTOR
                    scales = key_scales_ptr + page * scale_page_stride * _PAIRS_PER_VECTOR
                    _prefetch_page(codes, scales, steps > 0)
                next_in_table = gl.load(table + 1, mask=steps > 1, other=0).to(gl.int64)
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
                for stage in gl.static_range(_STAGES - 1):
                    if stage < steps:
                        keys = keys_ptr + page * page_stride * _BF16_PER_VECTOR
                        _copy_to_shared(ring.index(stage), keys + key_dim + dim)
                        page = gl.load(table + stage + 1, mask=stage + 1 < steps, other=0)
                        page = page.to(gl.int64)
                    async_copy.commit_group()
            scores = scores_ptr + ((first_row + score_row) * scores_stride)[None, :]
            scores += (score_key + block * _PAGE)[:, None]
            left = length - block * _PAGE
            for step in range(steps):
                page_scores = gl.zeros([_PAGE, _ROWS], gl.float32, layout=SCORES)
                if KEY_NVFP4:
                    if SM90:
                        codes = keys_ptr + next_in_table * page_stride * _WORDS_PER_VECTOR
                        scales = key_scales_ptr
                        scales += next_in_table * scale_page_stride * _PAIRS_PER_VECTOR
                        _prefetch_page(codes, scales, step + 1 < steps)
                    codes = keys_ptr + page * page_stride * _WORDS_PER_VECTOR
                    words = gl.load(codes + key_word + word, eviction_policy="evict_first")
                    scales = key_scales_ptr + page * scale_page_stride * _PAIRS_PER_VECTOR
                    pairs = gl.load(scales + key_pair + pair, eviction_policy="evict_first")
                    page = next_in_table
                    next_in_table = gl.load(table + step + 2, mask=step + 2 < steps, other=0)
                    next_in_table = next_in_table.to(gl.int64)
                    even, odd = decode(words, pairs, _PAGE, QUERY_NVFP4, WARPS)
                    even = gl.convert_layout(even, KEYS, assert_trivial=True)
                    odd = gl.convert_layout(odd, KEYS, assert_trivial=True)
                    page_scores = mma_v2(even, query_even, page_scores)
                    page_scores = mma_v2(odd, query_odd, page_scores)
                    page_scores *= FP16_FACTOR * FP16_FACTOR if QUERY_NVFP4 else BF16_FACTOR
                else:
                    # A group of copies is committed each step, empty ones too: so all but the
                    # youngest STAGES - 2 being done means that this step's page is here.
                    async_copy.wait_group(_STAGES - 2)
                    page_keys = ring.index(step % _STAGES).load(KEYS)
                    ahead = step + _STAGES - 1
                    if ahead < steps:
                        keys = keys_ptr + page * page_stride * _BF16_PER_VECTOR
                        _copy_to_shared(ring.index(ahead % _STAGES), keys + key_dim + dim)
                        page = gl.load(table + ahead + 1, mask=ahead + 1 < steps, other=0)
                        page = page.to(gl.int64)
                    async_copy.commit_group()
                    page_scores = mma_v2(page_keys, query, page_scores)
                written = (score_key < left)[:, None] & (score_row < rows_per_group)[None, :]
                gl.store(scores, page_scores, mask=written)
                scores += _PAGE
                left -= _PAGE
            todo -= steps
        group += 1
        block = 0
        length, table, first_page = next_length, next_table, next_page
        next_length, next_request = last_length, last_request
    if SM90 and KEY_NVFP4:
        # BF16 says so first; NVFP4 is faster so (`docs/explanation/triton.md`).
        tl.extra.cuda.gdc_launch_dependents()
