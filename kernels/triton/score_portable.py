"""The portable scoring kernel, in plain Triton.

It runs where the register-level kernel of `score_gluon` cannot: under the interpreter on a CPU
(``TRITON_INTERPRET=1``) and with Triton before 3.6. The work is shared out by the same code
(`shares`) and the arithmetic is the same; only the way from memory to the tensor cores is
left to the compiler.

NVFP4 keys are decoded to FP16 (for NVFP4 query rows) or BF16 (for BF16 rows), exactly:

- E2M1 bits ``s eem`` put at ``s << 15 | eem << 9`` are an FP16 of value ``code * 2^-14``; at
  ``s << 15 | eem << 6`` a BF16 of value ``code * 2^-126``. Zero and the subnormal 0.5 included.
- E4M3 bits ``s eeee mmm`` put at ``s << 31 | eeeemmm << 20`` are an FP32 of value
  ``scale * 2^-120``.

``code * scale`` has at most 6 significant bits, so it is exact in BF16, and in FP16 as
``code * scale * 2^-14``: the least, ``0.5 * 2^-9 * 2^-14 = 2^-24``, is the smallest subnormal. The
power of two is taken out of the FP32 sums at the end, exactly again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shares import FEW, NOT_SPECIALIZED, SCAN, SKIP, clamp_length, find_share, pages_of

_PAGE = tl.constexpr(64)
_DIM = tl.constexpr(128)
_PACKED = tl.constexpr(64)  # bytes of codes in a key
_BYTES_PER_SCALE = tl.constexpr(8)
_ROWS = tl.constexpr(16)  # query rows padded to what every tl.dot takes
_TWO_14 = tl.constexpr(2.0**14)
_TWO_28 = tl.constexpr(2.0**28)
_TWO_120 = tl.constexpr(2.0**120)


@triton.jit
def _scale_value(scale_bytes):
    bits = scale_bytes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * _TWO_120


@triton.jit
def _code_value(codes, scales):
    """float32 ``code * scale`` of the low nibbles of `codes`."""
    bits = codes.to(tl.int16)
    bits = ((bits & 8) << 12) | ((bits & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * _TWO_14 * scales


@triton.jit
def _decode(codes, scale_bytes, FP16: tl.constexpr):
    """Even and odd values of packed codes, times 2^-14 in FP16 or as they are in BF16."""
    scales = _scale_value(scale_bytes)
    even = _code_value(codes, scales)
    odd = _code_value(codes >> 4, scales)
    if FP16:
        even, odd = (even / _TWO_14).to(tl.float16), (odd / _TWO_14).to(tl.float16)
    else:
        even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    return even, odd


@triton.jit
def _dot(keys, query, UPCAST: tl.constexpr):
    # The interpreter multiplies BF16 bit patterns as integers, so it gets FP32 operands.
    if UPCAST:
        return tl.dot(keys.to(tl.float32), query.to(tl.float32), input_precision="ieee")
    return tl.dot(keys, query)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def score_kernel(
    query_ptr,  # bf16 [rows, 128] or uint8 [rows, 64]
    query_scales_ptr,  # uint8 [rows, 8]
    keys_ptr,  # bf16 [pages, 64, 128] or uint8 [pages, 64, 64]
    key_scales_ptr,  # uint8 [pages, 64, 8]
    table_ptr,  # int32 [requests, blocks]
    lengths_ptr,  # int32 [groups]
    requests_ptr,  # int32 [groups]
    scores_ptr,  # float32 [rows, max_context]
    groups,
    max_context,
    rows_per_group,
    query_stride: tl.int64,  # strides in elements
    query_scale_stride: tl.int64,
    page_stride: tl.int64,
    scale_page_stride: tl.int64,
    table_stride: tl.int64,
    scores_stride: tl.int64,
    QUERY_NVFP4: tl.constexpr,
    KEY_NVFP4: tl.constexpr,
    UPCAST: tl.constexpr,
):
    group, block, length, request, todo = find_share(
        lengths_ptr,
        requests_ptr,
        groups,
        max_context,
        tl.arange(0, FEW),
        tl.arange(0, SCAN),
        tl.arange(0, SKIP),
    )
    key = tl.arange(0, _PAGE)
    row = tl.arange(0, _ROWS)
    dim = tl.arange(0, _DIM)
    byte = tl.arange(0, _PACKED)
    live = row < rows_per_group
    while todo > 0:
        steps = tl.minimum(pages_of(length) - block, todo)
        if steps > 0:
            # [VALUES, ROWS]: the group's query rows, transposed
            query_rows = group.to(tl.int64) * rows_per_group + row
            query = query_ptr + (query_rows * query_stride)[None, :]
            if QUERY_NVFP4:
                scale = (byte // _BYTES_PER_SCALE)[:, None]
                query_scales = query_scales_ptr + (query_rows * query_scale_stride)[None, :]
                query_even, query_odd = _decode(
                    tl.load(query + byte[:, None], mask=live[None, :], other=0),
                    tl.load(query_scales + scale, mask=live[None, :], other=0),
                    True,
                )
            elif KEY_NVFP4:
                query_even = tl.load(query + 2 * byte[:, None], mask=live[None, :], other=0)
                query_odd = tl.load(query + 2 * byte[:, None] + 1, mask=live[None, :], other=0)
            else:
                query_all = tl.load(query + dim[:, None], mask=live[None, :], other=0)
            table = table_ptr + request.to(tl.int64) * table_stride
            scores = scores_ptr + (query_rows * scores_stride)[None, :]
            for step in range(steps):
                page = tl.load(table + block + step).to(tl.int64)
                keys = keys_ptr + page * page_stride
                if KEY_NVFP4:
                    # [PAGE, PACKED]
                    codes = tl.load(keys + key[:, None] * _PACKED + byte[None, :])
                    key_scales = key_scales_ptr + page * scale_page_stride
                    key_scales = key_scales + key[:, None] * (_PACKED // _BYTES_PER_SCALE)
                    scale_bytes = tl.load(key_scales + (byte // _BYTES_PER_SCALE)[None, :])
                    even, odd = _decode(codes, scale_bytes, QUERY_NVFP4)
                    page_scores = _dot(even, query_even, UPCAST) + _dot(odd, query_odd, UPCAST)
                    if QUERY_NVFP4:
                        page_scores *= _TWO_28
                else:
                    page_keys = tl.load(keys + key[:, None] * _DIM + dim[None, :])
                    page_scores = _dot(page_keys, query_all, UPCAST)
                position = (block + step) * _PAGE + key
                written = (position < length)[:, None] & live[None, :]
                tl.store(scores + position[:, None], page_scores, mask=written)
            todo -= steps
        group += 1
        block = 0
        if todo > 0:
            length = clamp_length(tl.load(lengths_ptr + group), max_context)
            request = tl.load(requests_ptr + group)
