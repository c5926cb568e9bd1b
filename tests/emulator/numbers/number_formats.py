"""Values of the number formats that tensor cores read, exactly, as float64.

Source: PTX ISA, "Fundamental Types" and "Alternate Floating-Point Data Formats". A format of
`exponent` bits, `mantissa` bits and bias `2^(exponent-1) - 1` holds

    (-1)^sign * 2^(e - bias) * (1 + m / 2^mantissa)      for e > 0
    (-1)^sign * 2^(1 - bias) * m / 2^mantissa            for e = 0 (subnormal)

Every value of every format here is a float64, so nothing is rounded on decoding.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SmallFloat:
    """A floating-point format of at most 8 bits, decoded by a table.

    Attributes
    ----------
    name : str
        Name in PTX.
    bits : int
        Width of an element.
    table : np.ndarray
        float64 `[2**bits]`: the value of each bit pattern.
    """

    name: str
    bits: int
    table: np.ndarray

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Values of `codes` (any unsigned integer array, each below `2**bits`), float64."""
        return self.table[codes]


def _finite_values(bits: int, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Values of every code by the formula of the module, special codes not yet replaced."""
    codes = np.arange(1 << bits)
    bias = (1 << (exponent_bits - 1)) - 1
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where(codes >> (mantissa_bits + exponent_bits) & 1, -1.0, 1.0)
    subnormal = exponent == 0
    significand = mantissa / (1 << mantissa_bits) + ~subnormal
    return sign * significand * np.exp2(np.maximum(exponent, 1) - bias)


def _e4m3_values(bits: int) -> np.ndarray:
    """E4M3 with (8 bits) or without (7 bits) sign: no infinity, all-ones is NaN."""
    values = _finite_values(bits, 4, 3)
    values[np.arange(1 << bits) & 0x7F == 0x7F] = np.nan
    return values


def _e5m2_values() -> np.ndarray:
    """E5M2: the largest exponent holds infinity (mantissa 0) and NaN, as in IEEE 754."""
    values = _finite_values(8, 5, 2)
    codes = np.arange(256)
    special = (codes & 0x7C) == 0x7C
    values[special] = np.where(codes[special] & 3, np.nan, np.copysign(np.inf, values[special]))
    return values


def _ue8m0_values() -> np.ndarray:
    """UE8M0: a power of two, `2^(code - 127)`; 0xff is NaN."""
    values = np.exp2(np.arange(256) - 127.0)
    values[0xFF] = np.nan
    return values


E2M1 = SmallFloat("e2m1", 4, _finite_values(4, 2, 1))
E2M3 = SmallFloat("e2m3", 6, _finite_values(6, 2, 3))
E3M2 = SmallFloat("e3m2", 6, _finite_values(6, 3, 2))
E4M3 = SmallFloat("e4m3", 8, _e4m3_values(8))
E5M2 = SmallFloat("e5m2", 8, _e5m2_values())
UE4M3 = SmallFloat("ue4m3", 7, _e4m3_values(7))
UE8M0 = SmallFloat("ue8m0", 8, _ue8m0_values())


@dataclass(frozen=True)
class WideFloat:
    """A floating-point format of 16 or 32 bits.

    Attributes
    ----------
    name : str
        Name in PTX.
    bits : int
        Width of an element in memory.
    """

    name: str
    bits: int

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Values of `codes` (uint16 or uint32, as wide as the format), float64."""
        if self.name == "f16":
            halves = np.ascontiguousarray(codes, np.uint16).view(np.float16)
            with np.errstate(invalid="ignore"):
                return halves.astype(np.float64)
        if self.name == "bf16":
            words = codes.astype(np.uint32) << np.uint32(16)
        elif self.name == "tf32":
            # The 13 low mantissa bits of an f32 do not belong to a tf32.
            words = codes & np.uint32(0xFFFFE000)
        else:
            words = np.ascontiguousarray(codes, np.uint32)
        with np.errstate(invalid="ignore"):  # signalling NaN
            return words.view(np.float32).astype(np.float64)


F16 = WideFloat("f16", 16)
BF16 = WideFloat("bf16", 16)
TF32 = WideFloat("tf32", 32)
F32 = WideFloat("f32", 32)


@dataclass(frozen=True)
class Integer:
    """An 8-bit or 32-bit integer format; values are exact in float64.

    Attributes
    ----------
    name : str
        Name in PTX.
    bits : int
        Width of an element.
    dtype : type
        The NumPy type of the same layout.
    """

    name: str
    bits: int
    dtype: type

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Values of `codes` (unsigned, as wide as the format), float64."""
        return codes.view(self.dtype).astype(np.float64)


S8 = Integer("s8", 8, np.int8)
U8 = Integer("u8", 8, np.uint8)
S32 = Integer("s32", 32, np.int32)

Format = SmallFloat | WideFloat | Integer


def to_f32_bits(values: np.ndarray) -> np.ndarray:
    """float64 values rounded once to FP32 (to nearest even), as uint32 bit patterns."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(np.float32).view(np.uint32)


def to_f16_bits(values: np.ndarray) -> np.ndarray:
    """float64 values rounded once to FP16 (to nearest even), as uint16 bit patterns."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(np.float16).view(np.uint16)


def to_s32_bits(values: np.ndarray, *, saturate: bool) -> np.ndarray:
    """Exact integers (float64) as uint32 bit patterns of S32: clamped, or modulo 2^32."""
    whole = values.astype(np.int64)
    if saturate:
        whole = np.clip(whole, -(1 << 31), (1 << 31) - 1)
    return (whole & 0xFFFFFFFF).astype(np.uint32)
