"""NVFP4 to tensor-core operands in registers: the instructions, two values at a time.

A 32-bit word holds four bytes ``b0 .. b3`` of codes, and byte ``b`` holds an even value in its low
nibble and an odd one in its high nibble, each ``s eem``. The assembly below turns one word into
four registers of two 16-bit values each:

    $0 = even(b0), even(b2)     $1 = even(b1), even(b3)
    $2 =  odd(b0),  odd(b2)     $3 =  odd(b1),  odd(b3)

Bytes 1 and 2 have changed places. Nobody minds: a score is a sum over values, and keys and query
rows go through the same code, so both sides are permuted alike (`permuted_byte` says how, for query
rows that are not packed). Even and odd values go to two MMAs, so that nothing is interleaved.

FP16. ``s << 15 | eem << 9`` is an FP16 of value ``code * 2^-14``, and fits its high byte. One
select spreads a whole word's even nibbles to ``s000eem0`` bytes, one its odd nibbles; the bytes
become high bytes by a shift and a mask. The scale ``s eeee mmm`` at ``eeeemmm << 7`` is an FP16 of
value ``scale * 2^-8``; adding its sign bit to itself carries it over bit 14 into bit 15. A product
is ``code * scale * 2^-14``: at most 6 significant bits and at least 2^-24, so exact.

BF16. ``s << 15 | eem << 6`` is a BF16 of value ``code * 2^-126`` and ``eeeemmm << 4`` one of value
``scale * 2^-120``, both with subnormals. Multiplied by 2^127 and 2^112 the scale is
``scale * 2^119``, and a product ``code * scale * 2^-7``, exact. FMAs with -0 stand for products,
which SM80 lacks in BF16.

`FP16_FACTOR` and `BF16_FACTOR` are what a key value is too small by.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FP16_FACTOR = gl.constexpr(2.0**14)
BF16_FACTOR = gl.constexpr(2.0**7)

# $1: a scale byte as int32. $0: the scale twice, in two 16-bit halves.
_FP16_SCALE = gl.constexpr("""
{
.reg .b32 y, t;
mul.lo.u32 y, $1, 0x00800080;
and.b32 t, y, 0x40004000;
add.u32 y, y, t;
mov.b32 t, 0x5C005C00;             // 256, 256
mul.rn.f16x2 $0, y, t;
}
""")
_BF16_SCALE = gl.constexpr("""
{
.reg .b32 y, t, z;
mov.b32 z, 0x80008000;             // -0, -0
mul.lo.u32 y, $1, 0x00100010;
and.b32 t, y, 0x08000800;
mad.lo.u32 y, t, 15, y;
mov.b32 t, 0x7F007F00;             // 2^127, 2^127
fma.rn.bf16x2 y, y, t, z;
mov.b32 t, 0x77807780;             // 2^112, 2^112
fma.rn.bf16x2 $0, y, t, z;
}
""")

# $4 .. $7: the word, once for each of its bytes. $8 .. $11: the scale of each, from above.
_OPERANDS = gl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r")
_FP16_VALUES = gl.constexpr("""
{
.reg .b32 l, h, t;
shl.b32 l, $4, 4;
shl.b32 t, $4, 1;
lop3.b32 l, l, t, 0x80808080, 0xE4;   // sign bits of l, the rest of t
shr.u32 t, $4, 3;
lop3.b32 h, $4, t, 0x80808080, 0xE4;
shl.b32 t, l, 8;
and.b32 t, t, 0x8E008E00;
and.b32 l, l, 0x8E008E00;
mul.rn.f16x2 $0, t, $8;
mul.rn.f16x2 $1, l, $8;
shl.b32 t, h, 8;
and.b32 t, t, 0x8E008E00;
and.b32 h, h, 0x8E008E00;
mul.rn.f16x2 $2, t, $8;
mul.rn.f16x2 $3, h, $8;
}
""")
_BF16_VALUES = gl.constexpr("""
{
.reg .b32 a, b, z;
mov.b32 z, 0x80008000;
shl.b32 a, $4, 12;
shl.b32 b, $4, 6;
and.b32 a, a, 0x80008000;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;   // (b & mask) | a
fma.rn.bf16x2 $0, a, $8, z;
shl.b32 a, $4, 4;
shr.u32 b, $4, 2;
and.b32 a, a, 0x80008000;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
fma.rn.bf16x2 $1, a, $8, z;
shl.b32 a, $4, 8;
shl.b32 b, $4, 2;
and.b32 a, a, 0x80008000;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
fma.rn.bf16x2 $2, a, $8, z;
shr.u32 b, $4, 6;
and.b32 a, $4, 0x80008000;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
fma.rn.bf16x2 $3, a, $8, z;
}
""")


@gluon.constexpr_function
def _row_bases(rows: int, warps: int) -> tuple[list, list, list]:
    """Row numbers that registers, lanes and warps add in an operand of m16n8k16 MMAs.

    8 lanes of 4 hold 8 rows; a key operand (64 rows) has 8 more in a second register, then warps
    take 16 rows each and registers the rest. A query operand (8 rows) is the same in every warp.
    """
    lanes = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    steps = warps.bit_length() - 1
    if rows == 8:
        return [], lanes, [[0, 0, 0]] * steps
    warp_rows = [[16 << i, 0, 0] for i in range(steps)]
    registers = [[8, 0, 0]]
    row = 16 * warps
    while row < rows:
        registers.append([row, 0, 0])
        row *= 2
    return registers, lanes, warp_rows


@gluon.constexpr_function
def words_layout(rows: int, warps: int) -> gl.DistributedLinearLayout:
    """[rows, 16 words, 4 bytes]: a lane of 4 holds 4 words next to each other, 16 bytes."""
    registers, lanes, warp_rows = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], *registers],
        [[0, 4, 0], [0, 8, 0], *lanes],
        warp_rows,
        [],
        [rows, 16, 4],
    )


@gluon.constexpr_function
def pairs_layout(rows: int, warps: int) -> gl.DistributedLinearLayout:
    """[rows, 4 pairs, 2 scales]: the two scales of the 16 bytes of `words_layout`."""
    registers, lanes, warp_rows = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *registers],
        [[0, 1, 0], [0, 2, 0], *lanes],
        warp_rows,
        [],
        [rows, 4, 2],
    )


@gluon.constexpr_function
def _blocks_layout(rows: int, warps: int) -> gl.DistributedLinearLayout:
    """[rows, 8 scales, 8 bytes]: `words_layout`, seen as blocks that share a scale."""
    registers, lanes, warp_rows = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], *registers],
        [[0, 2, 0], [0, 4, 0], *lanes],
        warp_rows,
        [],
        [rows, 8, 8],
    )


@gluon.jit
def permuted_byte(position):
    """Byte of a row of codes whose values stand at `position` of a decoded operand."""
    return (position & 0x3C) | ((position & 1) << 1) | ((position & 2) >> 1)


@gluon.jit
def decode(words, pairs, ROWS: gl.constexpr, FP16: gl.constexpr, WARPS: gl.constexpr):
    """Decode `ROWS` rows of codes, each lane the words that it holds: no data moves.

    Parameters
    ----------
    words : int32 [ROWS, 16] in ``SliceLayout(2, words_layout(ROWS, WARPS))``
    pairs : uint16 [ROWS, 4] in ``SliceLayout(2, pairs_layout(ROWS, WARPS))``, two scales each

    Returns
    -------
    even, odd : float16 or bfloat16 [ROWS, 64]
        Values of the low and of the high nibbles in the order of `permuted_byte`, divided by
        `FP16_FACTOR` or `BF16_FACTOR`; laid out as an MMA operand with ``k_width`` 16.
    """
    # [ROWS, 4, 2] -> [ROWS, 8]: split the pairs
    SPLIT: gl.constexpr = pairs_layout(ROWS, WARPS)
    parity = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, SPLIT)))
    parity = gl.expand_dims(gl.expand_dims(parity, 0), 0)
    both, parity = gl.broadcast(gl.expand_dims(pairs.to(gl.int32), 2), parity)
    scale_bytes = gl.reshape((both >> (8 * parity)) & 0xFF, [ROWS, 8])
    # [ROWS, 8] -> [ROWS, 64]: a scale for each byte
    BLOCKS: gl.constexpr = _blocks_layout(ROWS, WARPS)
    scale_bytes = gl.convert_layout(scale_bytes, gl.SliceLayout(2, BLOCKS), assert_trivial=True)
    scales = gl.inline_asm_elementwise(
        _FP16_SCALE if FP16 else _BF16_SCALE,
        "=r,r",
        [scale_bytes],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    scales, _ = gl.broadcast(
        gl.expand_dims(scales, 2), gl.full([ROWS, 8, 8], 0, gl.int32, layout=BLOCKS)
    )
    # [ROWS, 16] -> [ROWS, 64]: a word for each of its bytes
    BYTES: gl.constexpr = words_layout(ROWS, WARPS)
    codes, _ = gl.broadcast(
        gl.expand_dims(words, 2), gl.full([ROWS, 16, 4], 0, gl.int32, layout=BYTES)
    )
    codes = gl.reshape(codes, [ROWS, 64])
    scales = gl.convert_layout(
        gl.reshape(scales, [ROWS, 64]), codes.type.layout, assert_trivial=True
    )
    if FP16:
        even, odd = gl.inline_asm_elementwise(
            _FP16_VALUES,
            _OPERANDS,
            [codes, scales],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            _BF16_VALUES,
            _OPERANDS,
            [codes, scales],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return even, odd
