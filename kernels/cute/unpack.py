"""NVFP4 codes and scales to the operands of warp-level MMAs, in registers.

A 32-bit word holds eight E2M1 codes, code ``i`` in bits ``4i + 3 .. 4i`` as sign, two exponent bits
and one mantissa bit. Each function turns a word into the registers of two MMA operand halves, in
its own fixed order of the eight values; keys and query rows go through the same function, so that
the order cancels out of their dot product.

Everything here is exact. An E2M1 value times 2 is an integer of magnitude at most 12. FP16 bits
``sign << 15 | exponent and mantissa << 9`` are an E2M1 value times 2^-14, its zero and subnormal
included; BF16 bits ``sign << 15 | exponent and mantissa << 6`` are the value times 2^-126. An E4M3
scale has 4 significant bits, so value times scale has at most 6.
"""

from __future__ import annotations

from cutlass import Uint16, Uint32

from .ptx import (
    Registers,
    e2m1x8_to_f16x2,
    e4m3x2_to_f16x2,
    f16x2_to_floats,
    floats_to_bf16x2,
    multiply_bf16x2,
    multiply_f16x2,
    opaque_zero,
    permute_bytes,
)

# Twice the magnitudes of the eight E2M1 codes, one byte each: 0 1 2 3 | 4 6 8 12.
TWICE_MAGNITUDES_LOW = 0x03020100
TWICE_MAGNITUDES_HIGH = 0x0C080604
SIGN_OF_EACH_CODE = 0x88888888
SIGN_OF_EACH_BYTE = 0x80808080

# ---- Int8: twice the values, positive and negative ones apart ----------------------------------


def magnitude_table() -> Uint32:
    """Lower half of the table of magnitudes, in a register of its own.

    The compiler would otherwise move the constant into a register again before every look-up, as
    many instructions as the look-ups themselves.
    """
    return Uint32(TWICE_MAGNITUDES_LOW) + opaque_zero()


def codes_to_magnitudes(codes: Uint32, table: Uint32) -> tuple[Registers, Registers]:
    """Twice the magnitudes of the positive and of the negative codes, 2 x 4 bytes each.

    A byte permute looks the magnitude up with the code itself as selector: a nibble with a clear
    top bit picks a byte of the table, one with a set top bit gives that byte's sign, which is 0.
    So one instruction decodes four codes and drops the negative ones; with all sign bits flipped
    it drops the positive ones.
    """
    high = Uint32(TWICE_MAGNITUDES_HIGH)
    flipped = codes ^ Uint32(SIGN_OF_EACH_CODE)
    positive = tuple(permute_bytes(table, high, part) for part in (codes, codes >> 16))
    negative = tuple(permute_bytes(table, high, part) for part in (flipped, flipped >> 16))
    return positive, negative


def _negate_magnitudes(magnitudes: Uint32) -> Uint32:
    """Four bytes of 0..127, each negated; no borrow crosses a byte."""
    sign = Uint32(SIGN_OF_EACH_BYTE)
    return (sign - magnitudes) ^ sign


def codes_to_int8(codes: Uint32, table: Uint32) -> Registers:
    """Twice the values as signed bytes, 2 x 4 of them."""
    positive, negative = codes_to_magnitudes(codes, table)
    return tuple(p | _negate_magnitudes(n) for p, n in zip(positive, negative, strict=True))


# ---- FP16 and BF16 ----------------------------------------------------------------------------


def _codes_to_high_bytes(codes: Uint32) -> tuple[Uint32, Uint32]:
    """High bytes of the FP16 patterns of the even and of the odd codes; the low bytes are 0."""
    magnitude, sign = Uint32(0x0E0E0E0E), Uint32(SIGN_OF_EACH_BYTE)
    even = ((codes << 1) & magnitude) | ((codes << 4) & sign)
    odd = ((codes >> 3) & magnitude) | (codes & sign)
    return even, odd


def codes_to_f16(codes: Uint32, scale: Uint32) -> Registers:
    """Values times 2^-14 times the scale pair, as four FP16 pairs."""
    zero = Uint32(0)
    pairs = []
    for high_bytes in _codes_to_high_bytes(codes):
        pairs.append(permute_bytes(high_bytes, zero, Uint32(0x1404)))
        pairs.append(permute_bytes(high_bytes, zero, Uint32(0x3424)))
    return tuple(multiply_f16x2(pair, scale) for pair in pairs)


def codes_to_f16_by_conversion(codes: Uint32, scale: Uint32) -> Registers:
    """Values times the scale pair, as four FP16 pairs (SM10x has an instruction for it)."""
    return tuple(multiply_f16x2(pair, scale) for pair in e2m1x8_to_f16x2(codes))


def codes_to_bf16(codes: Uint32, scale: Uint32) -> Registers:
    """Values times 2^-6 times the scale pair, as four BF16 pairs: codes (i, i + 4) for i = 0..3."""
    sign, magnitude = Uint32(0x80008000), Uint32(0x01C001C0)
    to_normal = Uint32(0x7B807B80)  # 2^120 twice: takes the value times 2^-126 to 2^-6
    pairs = (
        ((codes << 12) & sign) | ((codes << 6) & magnitude),
        ((codes << 8) & sign) | ((codes << 2) & magnitude),
        ((codes << 4) & sign) | ((codes >> 2) & magnitude),
        (codes & sign) | ((codes >> 6) & magnitude),
    )
    return tuple(multiply_bf16x2(multiply_bf16x2(pair, to_normal), scale) for pair in pairs)


def order_bf16_as_codes(values: Registers) -> Registers:
    """Eight consecutive BF16 values in the pair order of `codes_to_bf16`."""
    first, second, third, fourth = values
    low, high = Uint32(0x5410), Uint32(0x7632)
    return (
        permute_bytes(first, third, low),
        permute_bytes(first, third, high),
        permute_bytes(second, fourth, low),
        permute_bytes(second, fourth, high),
    )


# ---- Scales -----------------------------------------------------------------------------------


def scales_to_f16(pair: Uint16) -> Registers:
    """Two E4M3 scales, each as an FP16 pair of itself."""
    scales = e4m3x2_to_f16x2(pair)
    return (
        permute_bytes(scales, scales, Uint32(0x1010)),
        permute_bytes(scales, scales, Uint32(0x3232)),
    )


def scales_to_bf16(pair: Uint16) -> Registers:
    """Two E4M3 scales, each as a BF16 pair of itself."""
    low, high = f16x2_to_floats(e4m3x2_to_f16x2(pair))
    return floats_to_bf16x2(low, low), floats_to_bf16x2(high, high)
