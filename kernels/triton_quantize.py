"""The Triton kernel of `quantize_write_nvfp4`: rows of 128 values to codes and scales, in place.

Every rounding is that of `sdsa_quant.nvfp4`, in arithmetic that every GPU has: no GPU before SM100
converts to E2M1, and SM80 does not convert to E4M3. To round ``x >= 0`` to a format with ``m`` bits
after the leading one, whose smallest normal exponent is ``e0``, take ``e = max(exponent(x), e0)``.
The FP32 adder rounds ``x + 2^(e + 23 - m)`` to a multiple of ``2^(e - m)``, nearest even, and the
low bits of the sum count them. Subnormals (``e = e0``) need no case of their own:

    bits = count + ((e - e0) << m)

Nothing may fuse the product ``x * inverse`` with that addition; the saturation between them sees
to it. Division and reciprocal are correctly rounded: approximate ones would move scales and codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

_DIM = tl.constexpr(128)
_HALVES = tl.constexpr(16)  # half blocks in a row: 8 values, one word of codes, one 16-byte load
_SCALES = tl.constexpr(8)
_PAGE = tl.constexpr(64)
_WORDS = tl.constexpr(16)  # 32-bit words of codes in a row
_EXPONENT = tl.constexpr(0x7F800000)
_TWO_120 = tl.constexpr(2.0**120)
_SIXTH = tl.constexpr(0.16666667163372040)  # 1 / 6 rounded to float32
_NVFP4_MAX = tl.constexpr(2688.0)  # 6 * 448: what saturates


def _offset(mantissa: int, least_exponent: int) -> int:
    """What `_round_to` gives too much: the same for every value, so taken out last."""
    return ((23 - mantissa) << 23) + ((127 + least_exponent) << mantissa)


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


_SCALE_OFFSET = tl.constexpr(_int32(_offset(3, -6)))
_WORD_OFFSET = tl.constexpr(_int32(sum(_offset(1, 0) << (4 * i) for i in range(8))))


@triton.jit
def _round_to(x, MANTISSA: tl.constexpr, LEAST_EXPONENT: tl.constexpr):
    """Bits of ``x >= 0`` rounded to `MANTISSA` bits after the leading one, plus `_offset`."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & _EXPONENT, (127 + LEAST_EXPONENT) << 23)
    magic = exponent + ((23 - MANTISSA) << 23)
    total = (x + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return total - exponent + (exponent >> (23 - MANTISSA))


@triton.jit
def _divide_by_6(x):
    """``x / 6`` correctly rounded: Markstein's correction of a product with the rounded 1 / 6.

    Exact as division wherever ``x / 6`` is above 2^-100, far below the least scale that is not 0.
    """
    quotient = x * _SIXTH
    return tl.fma(tl.fma(quotient, -6.0, x), _SIXTH, quotient)


@triton.jit
def _inverse_of_scale(scales):
    """``1 / scale`` of E4M3 bits, correctly rounded, or 0 where the scale is 0.

    One Newton step from an approximation; a test goes through every scale.
    """
    vanished = scales == 0
    value = (scales << 20).to(tl.float32, bitcast=True) * _TWO_120
    value = tl.where(vanished, 1.0, value)
    inverse = 1.0 / value
    inverse = tl.fma(tl.fma(-value, inverse, 1.0), inverse, inverse)
    return tl.where(vanished, 0.0, inverse)


@triton.jit
def _or(left, right):
    return left | right


@triton.jit
def quantize_rows(x):
    """Words of codes and scale bytes of float32 values [ROWS, 16, 8].

    Returns
    -------
    words : int32 [ROWS, 16]
    scales : int32 [ROWS, 8]
    """
    ROWS: tl.constexpr = x.shape[0]
    # A maximum or minimum of NaN and a number is the number: NaN does not count towards amax (0 is
    # what a block of nothing else leaves), and its code is +6.
    # [ROWS, 16] -> [ROWS, 8, 2] -> [ROWS, 8]
    amax = tl.max(tl.reshape(tl.max(tl.abs(x), 2), (ROWS, _SCALES, 2)), 2)
    amax = tl.minimum(tl.maximum(amax, 0.0), _NVFP4_MAX)
    scales = _round_to(_divide_by_6(amax), 3, -6) - _SCALE_OFFSET
    inverse = _inverse_of_scale(scales)
    inverse = tl.broadcast_to(inverse[:, :, None], (ROWS, _SCALES, 2))
    inverse = tl.reshape(inverse, (ROWS, _HALVES))[:, :, None]

    scaled = tl.maximum(tl.minimum(x * inverse, 6.0), -6.0)
    nibble = (4 * tl.arange(0, 8))[None, None, :]
    words = tl.sum(_round_to(tl.abs(scaled), 1, 0) << nibble, 2) - _WORD_OFFSET
    signs = (scaled.to(tl.int32, bitcast=True) >> (28 - nibble)) & (8 << nibble)
    words |= tl.reduce(signs, 2, _or)
    return words, scales


@triton.jit
def _write_rows(
    x_ptr,
    places_ptr,
    codes_ptr,
    scales_ptr,
    count,
    x_stride,
    codes_stride,
    scales_stride,
    tile,
    PLACES_PER_RECORD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantize one tile of `ROWS` rows and write each to its place, ``place // PLACES_PER_RECORD``
    records and ``place % PLACES_PER_RECORD`` rows in; negative places are skipped."""
    row = tile * ROWS + tl.arange(0, ROWS)
    place = tl.load(places_ptr + row, mask=row < count, other=-1)
    live = place >= 0
    half = tl.arange(0, _HALVES)
    value = tl.arange(0, 8)
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # values in 16 bytes
    x = x_ptr + (row.to(tl.int64) * x_stride * VECTOR)[:, None, None]
    x += half[None, :, None] * 8 + value[None, None, :]
    words, scales = quantize_rows(tl.load(x, mask=live[:, None, None], other=0.0).to(tl.float32))
    record = place // PLACES_PER_RECORD
    inside = place % PLACES_PER_RECORD
    codes = codes_ptr + (record * codes_stride * 4 + inside * _WORDS)[:, None]
    tl.store(codes + half[None, :], words, mask=live[:, None])
    out = scales_ptr + (record * scales_stride + inside * _SCALES)[:, None]
    tl.store(out + tl.arange(0, _SCALES)[None, :], scales.to(tl.uint8), mask=live[:, None])


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "query_rows_ptr",
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
def quantize_write_kernel(
    key_ptr,  # bf16, fp16 or fp32 [keys, 128]
    slots_ptr,  # int64 [keys]
    key_cache_ptr,  # int32 [pages, 64, 16]
    key_scales_ptr,  # uint8 [pages, 64, 8]
    query_ptr,  # like key_ptr [queries, 128]
    query_rows_ptr,  # int64 [queries]
    packed_query_ptr,  # int32 [rows, 16]
    query_scales_ptr,  # uint8 [rows, 8]
    keys,
    queries,
    key_stride: tl.int64,  # vectors of 16 bytes
    query_stride: tl.int64,
    page_stride: tl.int64,
    packed_stride: tl.int64,
    scale_page_stride: tl.int64,  # bytes
    query_scale_stride: tl.int64,
    ROWS: tl.constexpr,
):
    tile = tl.program_id(0)
    key_tiles = tl.cdiv(keys, ROWS)
    if tile < key_tiles:
        _write_rows(
            key_ptr,
            slots_ptr,
            key_cache_ptr,
            key_scales_ptr,
            keys,
            key_stride,
            page_stride,
            scale_page_stride,
            tile,
            _PAGE,
            ROWS,
        )
    else:
        _write_rows(
            query_ptr,
            query_rows_ptr,
            packed_query_ptr,
            query_scales_ptr,
            queries,
            query_stride,
            packed_stride,
            query_scale_stride,
            tile - key_tiles,
            1,
            ROWS,
        )
