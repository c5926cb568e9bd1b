"""The Triton kernel of `quantize_write_nvfp4`: rows of 128 values to codes and scales, in place.

Every rounding is that of `sdsa_quant.formats.nvfp4`, in arithmetic that every GPU has: no GPU
before SM100 converts to E2M1, and SM80 does not convert to E4M3. The kernel is bound by
instructions, so what each value costs is counted below. Division and reciprocal are correctly
rounded, once a block: approximate ones would move scales and codes.

**Codes.** Past 2 and past 4 the step between E2M1 magnitudes doubles, so a magnitude ``y`` counted
in steps is ``min(2 y, y + 2, y / 2 + 4, 7)``. Rounding keeps order, so each of the four may as well
be rounded before the least is taken, and the FP32 adder does that: ``fma(y, 2, 2^23)`` is rounded
once, to an integer, nearest even, and the low bits of the sum count the steps. An even count is an
even mantissa, so ties go where E2M1 sends them. The last two are ``7 - saturate(3 - y / 2)``: exact
where it counts, saturation for free on a GPU, and 7 for NaN, as the hardware converts it. The
product ``y`` must be rounded to FP32 before, so `COMPILE_OPTIONS` must not let anything fuse it.

A factor of -4 times the sign, added to the count, makes ``count - 4`` or ``count + 4``: the sign
bit of the nibble, up to a constant that is taken out of a whole word of codes. The product of a NaN
is positive on a GPU.

**Scales.** To round ``x >= 0`` to a format with ``m`` bits after the leading one, whose smallest
normal exponent is ``e0``, take ``e = max(exponent(x), e0)``. The FP32 adder rounds
``x + 2^(e + 23 - m)`` to a multiple of ``2^(e - m)``, nearest even, and the low bits of the sum
count them. Subnormals (``e = e0``) need no case of their own: ``bits = count + ((e - e0) << m)``.

**Work.** Four threads share a row. A thread takes blocks ``b`` and ``b + 4`` of it, each whole, so
that no value is passed between threads, and loads them 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAGE_BITS = tl.constexpr(6)  # 64 keys in a page
_IN_PAGE = tl.constexpr(2**6 - 1)
_UNITS = tl.constexpr(4)  # threads' shares of a row: two blocks of 16 values each
_BLOCKS = tl.constexpr(8)  # 8 bytes of codes and one scale each
_EXPONENT = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-(2**31))
_ONE = tl.constexpr(0x3F800000)
_UPPER_HALF = tl.constexpr(-(2**16))
_LOWER_WORD = tl.constexpr(2**32 - 1)
_TWO_120 = tl.constexpr(2.0**120)
_COUNTER = tl.constexpr(2.0**23 + 8)  # from 2^23 to 2^24 a float32's last bit is 1
_SIXTH = tl.constexpr(0.16666667163372040)  # 1 / 6 rounded to float32
_NVFP4_MAX = tl.constexpr(2688.0)  # 6 * 448: what saturates
_INVERSE_GUESS = tl.constexpr(0x7EF311C7)


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


# What `round_to_e4m3` and the sum of 8 shifted codes give too much: constants, taken out last.
_SCALE_OFFSET = tl.constexpr(_int32(((23 - 3) << 23) + ((127 - 6) << 3)))
_WORD_OFFSET = tl.constexpr(_int32(sum((0x4B000000 + 4) << (4 * i) for i in range(8))))


@triton.jit
def round_to_e4m3(x):
    """E4M3 bits of ``0 <= x <= 448``."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & _EXPONENT, (127 - 6) << 23)
    magic = exponent + ((23 - 3) << 23)
    total = (x + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return total - exponent + (exponent >> (23 - 3)) - _SCALE_OFFSET


@triton.jit
def divide_by_6(x):
    """``x / 6`` correctly rounded: Markstein's correction of a product with the rounded 1 / 6.

    Exact as division wherever ``x / 6`` is above 2^-100, far below the least scale that is not 0.
    """
    quotient = x * _SIXTH
    return tl.fma(tl.fma(quotient, -6.0, x), _SIXTH, quotient)


@triton.jit
def inverse_of_scale(scales):
    """``1 / scale`` of E4M3 bits, correctly rounded, or 0 where the scale is 0.

    Four Newton steps from a guess that negates the exponent; a test goes through every scale.
    """
    value = (scales << 20).to(tl.float32, bitcast=True) * _TWO_120
    inverse = (-value.to(tl.int32, bitcast=True) + _INVERSE_GUESS).to(tl.float32, bitcast=True)
    for _ in tl.static_range(4):
        inverse = tl.fma(tl.fma(-value, inverse, 1.0), inverse, inverse)
    return tl.where(scales == 0, 0.0, inverse)


@triton.jit
def _shifted_codes(x, inverse, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Sum over ``i`` of the codes of float32 `x` [N, 4] at bits ``FIRST + STEP i``, with offset."""
    scaled = x * inverse[:, None]
    y = tl.abs(scaled)
    up_to_2 = tl.fma(y, 2.0, _COUNTER)
    up_to_4 = y + (_COUNTER + 2.0)
    short_of_7 = tl.minimum(tl.maximum(tl.fma(y, -0.5, 3.0), 0.0), 1.0)
    above = tl.fma(short_of_7, -1.0, _COUNTER + 7.0)
    # A minimum of NaN and a number is the number.
    count = tl.minimum(tl.minimum(up_to_2, up_to_4), above)
    sign = ((scaled.to(tl.int32, bitcast=True) & _SIGN) | _ONE).to(tl.float32, bitcast=True)
    code = tl.fma(sign, -4.0, count).to(tl.int32, bitcast=True)
    return tl.sum(code << (FIRST + STEP * tl.arange(0, 4))[None, :], 1)


@triton.jit
def _word_of_codes(first, second, inverse, ALTERNATING: tl.constexpr):
    """The codes of 8 values: `first` and `second` are the even and odd ones, or the halves."""
    if ALTERNATING:
        word = _shifted_codes(first, inverse, 0, 8) + _shifted_codes(second, inverse, 4, 8)
    else:
        word = _shifted_codes(first, inverse, 0, 4) + _shifted_codes(second, inverse, 16, 4)
    return word - _WORD_OFFSET


@triton.jit
def _largest(first, second):
    return tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)


@triton.jit
def _quantize_blocks(a, b, c, d, ALTERNATING: tl.constexpr):
    """Codes and scales of N blocks: `a`, `b` their first 8 values, `c`, `d` the rest.

    Parameters
    ----------
    a, b, c, d : float32 [N, 4]
        As `load_8` gives them.

    Returns
    -------
    codes : int64 [N]
    scales : int32 [N]
    """
    # A maximum of NaN and a number is the number: NaN does not count towards amax, and 0 is what a
    # block of nothing else leaves.
    amax = tl.maximum(_largest(a, b), _largest(c, d))
    amax = tl.minimum(tl.maximum(amax, 0.0), _NVFP4_MAX)
    scales = round_to_e4m3(divide_by_6(amax))
    inverse = inverse_of_scale(scales)
    lower = _word_of_codes(a, b, inverse, ALTERNATING).to(tl.int64) & _LOWER_WORD
    upper = _word_of_codes(c, d, inverse, ALTERNATING).to(tl.int64) << 32
    return lower | upper, scales


@triton.jit
def load_8(words_ptr, live, dtype: tl.constexpr):
    """8 values from each of `words_ptr` [N], as two float32 [N, 4].

    The even and the odd ones of 16-bit values, the first and the last four of float32.
    """
    words_ptr = words_ptr[:, None] + tl.arange(0, 4)[None, :]
    words = tl.load(words_ptr, mask=live[:, None], other=0)
    if dtype == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        words = tl.load(words_ptr + 4, mask=live[:, None], other=0)
        second = words.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & _UPPER_HALF).to(tl.float32, bitcast=True)
    else:
        first = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


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
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantize one tile of `ROWS` rows and write each to its index; negative ones are skipped.

    An index is a slot of a paged cache (page ``index // 64``, key ``index % 64``) or a row.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = dtype.primitive_bitwidth // 4  # 32-bit words of 8 values
    thread = tl.arange(0, ROWS * _UNITS)
    row = tile * ROWS + thread // _UNITS
    block = thread % _UNITS
    index = tl.load(index_ptr + row, mask=row < count, other=-1)
    live = index >= 0
    words = x_ptr.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * x_stride * 4)
    words += block * (2 * WORDS)
    a, b = load_8(words, live, dtype)
    c, d = load_8(words + WORDS, live, dtype)
    words += _UNITS * 2 * WORDS
    e, f = load_8(words, live, dtype)
    g, h = load_8(words + WORDS, live, dtype)
    if PAGED:
        record = index >> _PAGE_BITS
        block += (index & _IN_PAGE).to(tl.int32) * _BLOCKS
    else:
        record = index
    out_codes = codes_ptr + (record * codes_stride * 2 + block)
    out_scales = scales_ptr + (record * scales_stride + block)
    ALTERNATING: tl.constexpr = dtype != tl.float32
    codes, scales = _quantize_blocks(a, b, c, d, ALTERNATING)
    tl.store(out_codes, codes, mask=live)
    tl.store(out_scales, scales.to(tl.uint8), mask=live)
    codes, scales = _quantize_blocks(e, f, g, h, ALTERNATING)
    tl.store(out_codes + _UNITS, codes, mask=live)
    tl.store(out_scales + _UNITS, scales.to(tl.uint8), mask=live)


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
def quantize_write_kernel(
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
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:  # `launch` says why, and why before anything else
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
            True,
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
            False,
            ROWS,
        )
