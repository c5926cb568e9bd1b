"""What the kernels of several rules do with a block: load it, round to E2M1, put codes into words.

A thread has a block: its 16 values are a tuple of 16 tensors with one element a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantize import load_8

_HALVES = tl.constexpr(1.5 * 2.0**22)  # added and taken away, it rounds to multiples of 0.5
_TWO_120 = tl.constexpr(2.0**120)
_LOWER_WORD = tl.constexpr(2**32 - 1)


@triton.jit
def nearest_code(y):
    """E2M1 value nearest to float32 `y`, ties to even, a zero +0.

    Few operations wait for one another: all three roundings are done, then one is taken.
    """
    magnitude = tl.abs(y)
    below_2 = (y + _HALVES) - _HALVES
    below_4 = (y + 2 * _HALVES) - 2 * _HALVES
    most = tl.where(magnitude <= 5.0, 4.0, 6.0)
    most = tl.where(y < 0, -most, most)
    return tl.where(magnitude < 2.0, below_2, tl.where(magnitude < 4.0, below_4, most))


@triton.jit
def nibble(code, x):
    """The four bits of an E2M1 value, a zero with the sign of `x`; those of +6 where `x` is NaN."""
    y = tl.abs(code)
    count = tl.minimum(tl.minimum(y * 2.0, y + 2.0), tl.fma(y, 0.5, 4.0)).to(tl.int32)
    signed = tl.where(code == 0, x, code)
    sign = (signed.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, count | sign, 7)


@triton.jit
def four(values):
    """The columns of [N, 4]."""
    rows: tl.constexpr = values.shape[0]
    even, odd = tl.split(tl.reshape(values, [rows, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def load_block(words_ptr, live, dtype: tl.constexpr):
    """16 values from each of `words_ptr` [N] as 16 float32 [N]."""
    WORDS: tl.constexpr = dtype.primitive_bitwidth // 4
    a, b = load_8(words_ptr, live, dtype)
    c, d = load_8(words_ptr + WORDS, live, dtype)
    a, b, c, d = four(a), four(b), four(c), four(d)
    values = ()
    if dtype == tl.float32:
        values = a + b + c + d
    else:
        for i in tl.static_range(4):
            values = values + (a[i], b[i])
        for i in tl.static_range(4):
            values = values + (c[i], d[i])
    return values


@triton.jit
def scale_value(scales):
    return (scales << 20).to(tl.float32, bitcast=True) * _TWO_120


@triton.jit
def word(codes, x, FIRST: tl.constexpr):
    """Four bytes of codes: 8 values from `FIRST` on."""
    word = nibble(codes[FIRST], x[FIRST])
    for j in tl.static_range(1, 8):
        word |= nibble(codes[FIRST + j], x[FIRST + j]) << (4 * j)
    return word


@triton.jit
def code_bytes(codes, x):
    """int64 ``[N]``: the 8 bytes of 16 E2M1 values, zeros with the sign of `x`."""
    first = word(codes, x, 0).to(tl.int64) & _LOWER_WORD
    return first | (word(codes, x, 8).to(tl.int64) << 32)
